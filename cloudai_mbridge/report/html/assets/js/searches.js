// How the searches among the points of tests went: the trials in their order, and what each was found to be.

const OUTCOMES = ["measured", "ended early", "out of memory", "failed"];

function trialsOf(search) {
  let best = Infinity;
  return search.trials.map((trial, i) => {
    const measured = toNumber(trial.step_time_s);
    if (trial.outcome === "measured" && isFinal(measured)) best = Math.min(best, measured);
    return {
      ...trial,
      number: i + 1,
      measured,
      predicted: toNumber(trial.predicted_step_time_s),
      best: Number.isFinite(best) ? best : null,
    };
  });
}

function searchText(search) {
  const tried = `${count(search.trials.length)} of ${plural(search.points, "point")} tried`;
  const cost = `${formatNumber(search.gpu_hours, 3)} GPU-hours`;
  if (search.best === null) return `${tried}, ${cost}; none succeeded.`;
  const next = search.runner_up === null ? "" : `, then ${search.runner_up}: ${formatNumber(search.runner_up_s)} s`;
  return `${tried}, ${cost}. Best: ${search.best}, ${formatNumber(search.step_time_s)} s a step${next}.`;
}

function trialFigure(search) {
  const trials = trialsOf(search);
  const timed = trials.filter((trial) => isFinal(trial.measured));
  const failed = trials.filter((trial) => !isFinal(trial.measured));
  const predicted = trials.filter((trial) => isFinal(trial.predicted));
  const tip = (trial) =>
    [
      `trial ${trial.number}: ${shorten(trial.label, 70)}`,
      `${trial.outcome}${isFinal(trial.measured) ? `, ${formatNumber(trial.measured)} s` : ""}`,
      ...(isFinal(trial.predicted) ? [`predicted ${formatNumber(trial.predicted)} s`] : []),
    ].join("\n");
  function draw(width) {
    if (!timed.length) return null;
    const log = isSpread([...timed.map((trial) => trial.measured), ...predicted.map((trial) => trial.predicted)]);
    const ofBest = trials.filter((trial) => trial.best !== null);
    return plot(width, {
      marginLeft: 62,
      x: { label: "trial →", domain: [0.5, trials.length + 0.5], ticks: trialTicks(trials.length, width), tickFormat: "d" },
      y: { label: "↑ step time (s)", grid: true, type: log ? "log" : "linear", nice: true, ...(log && LOG_TICKS) },
      marks: [
        Plot.frame({ stroke: "var(--line)" }),
        Plot.line(ofBest, { x: "number", y: "best", curve: "step-after", stroke: "var(--data)", strokeWidth: 1.8 }),
        Plot.dot(predicted, { x: "number", y: "predicted", symbol: "plus", stroke: "var(--muted)", r: 4 }),
        Plot.dot(timed, {
          x: "number",
          y: "measured",
          r: 4,
          stroke: "var(--data)",
          fill: (trial) => (trial.outcome === "measured" ? "var(--data)" : "var(--surface)"),
        }),
        Plot.dot(failed, { x: "number", frameAnchor: "top", dy: 6, symbol: "times", stroke: "var(--failed)", r: 5 }),
        hover(timed, Plot.pointer({ x: "number", y: "measured", title: tip })),
      ],
    });
  }
  return figure({
    title: `Trials of ${search.test_id}`,
    note: "The line is the best so far; hollow: ended early; a plus: predicted; a cross at the top: failed.",
    draw,
    label: () => `Step time of ${plural(trials.length, "trial")} in their order. ${searchText(search)}`,
    empty: "No trial has a step time.",
    numbers: () => ({
      head: ["trial", "point", "outcome", "runs", "measured (s)", "predicted (s)", "GPU-hours"],
      rows: trials
        .slice(0, 500)
        .map((trial) => [
          String(trial.number),
          trial.label,
          trial.outcome,
          String(trial.runs),
          formatNumber(trial.measured),
          formatNumber(trial.predicted),
          formatNumber(trial.gpu_hours, 3),
        ]),
      numbers: [0, 3, 4, 5, 6],
      total: trials.length,
    }),
  });
}

function trialTicks(number, width) {
  const step = Math.max(1, Math.ceil(number / Math.max(2, width / 60)));
  return d3.range(1, number + 1, step);
}

function outcomesText(search) {
  const counts = d3.rollup(
    search.trials,
    (trials) => trials.length,
    (trial) => trial.outcome,
  );
  return OUTCOMES.filter((outcome) => counts.has(outcome))
    .map((outcome) => `${count(counts.get(outcome))} ${outcome}`)
    .join(", ");
}

// What the trials have told of the predictions.
function ratioText(search) {
  const ratios = trialsOf(search)
    .filter((trial) => trial.outcome === "measured" && isFinal(trial.measured) && trial.predicted > 0)
    .map((trial) => trial.measured / trial.predicted);
  return ratios.length ? `measured over predicted: ${formatNumber(d3.median(ratios), 3)} (median)` : "";
}

function searchesSection() {
  const searches = HEAD.searches ?? [];
  if (!searches.length) return null;
  const parts = searches.flatMap((search) => [
    h("p", {}, data(searchText(search))),
    h("p", { class: "note" }, data([outcomesText(search), ratioText(search), search.ending].filter(Boolean).join("; "))),
    search.best_definition ? h("p", { class: "note" }, "Its test definition: ", data(search.best_definition)) : null,
    trialFigure(search).element,
  ]);
  return section("searches", searches.length > 1 ? "Searches" : "Search", parts);
}
