// What was predicted of a point before it ran, against what it measured.

function pairsOf(id) {
  return state.filtered
    .filter(succeeded)
    .map((run) => ({ run, measured: MEASURE[id].of(run), predicted: toNumber(run.predicted?.[id]) }))
    .filter((pair) => isFinal(pair.measured) && isFinal(pair.predicted) && pair.measured > 0 && pair.predicted > 0);
}

function errorOf(pair) {
  return pair.predicted / pair.measured - 1;
}

function errorText(pairs) {
  const errors = pairs.map(errorOf);
  const typical = d3.median(errors, Math.abs);
  const scatter = `half of the runs within ${formatShare(typical)} (n=${count(pairs.length)})`;
  return `Median error ${formatChange(d3.median(errors))}, ${scatter}.`;
}

function predictedFigure(id) {
  const measure = MEASURE[id];
  const words = h("p", { class: "note" });
  function draw(width) {
    const pairs = pairsOf(id);
    words.textContent = pairs.length ? errorText(pairs) : "";
    if (!pairs.length) return null;
    const [low, high] = d3.extent(pairs.flatMap((pair) => [pair.measured, pair.predicted]));
    const domain = [low * 0.95, high * 1.05];
    const tip = (pair) =>
      tipText(
        pair.run,
        `measured ${formatNumber(pair.measured)} ${measure.unit}`,
        `predicted ${formatNumber(pair.predicted)}: ${formatChange(errorOf(pair))}`,
      );
    const type = high / low > LARGE_SPREAD ? "log" : "linear";
    return plot(width, {
      height: Math.min(380, Math.max(240, width * 0.75)),
      marginLeft: 62,
      x: { label: "measured →", domain, type, grid: true, ticks: Math.max(2, width / 110) },
      y: { label: "↑ predicted", domain, type, grid: true, ticks: 6 },
      marks: [
        Plot.line(
          [domain, domain].map((ends, i) => [ends[i], ends[i]]),
          { stroke: "var(--control)", strokeDasharray: "5 4" },
        ),
        Plot.dot(pairs, { x: "measured", y: "predicted", ...dotStyle(pairs.length) }),
        hover(pairs, Plot.pointer({ x: "measured", y: "predicted", title: tip })),
      ],
    });
  }
  const chart = figure({
    title: unitLabel(measure),
    draw,
    label: () => `Predicted against measured ${measure.label}. ${errorText(pairsOf(id))}`,
    empty: "No successful run that passes the filter has both numbers.",
    numbers: () => ({
      head: ["point", "measured", "predicted", "error"],
      rows: pairsOf(id)
        .slice(0, 500)
        .map((pair) => [
          pair.run.name,
          formatNumber(pair.measured),
          formatNumber(pair.predicted),
          formatChange(errorOf(pair)),
        ]),
      numbers: [1, 2, 3],
      total: pairsOf(id).length,
    }),
  });
  chart.element.querySelector("figcaption").append(words);
  return chart;
}

function predictedSection() {
  const title = "Predicted against measured";
  const ids = MEASURES.map((measure) => measure.id).filter((id) => pairsOf(id).length);
  if (!ids.length) {
    return {
      element: section("predicted", title, emptyLine("This report has no predictions of what was measured.")),
      onFilter: [],
      onSelection: [],
    };
  }
  const charts = ids.map(predictedFigure);
  const note = "On the dashed line the prediction was right.";
  const element = section(
    "predicted",
    title,
    h("p", { class: "note" }, note),
    h(
      "div",
      { class: "small-columns" },
      charts.map((chart) => chart.element),
    ),
  );
  return { element, onFilter: charts.map((chart) => chart.redraw), onSelection: [] };
}
