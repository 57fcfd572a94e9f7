// How the counted step times of each run scatter.

const MOST_BOXES = 30;

function distributionRuns() {
  const hasTimes = (run) => medianTime(run) !== undefined;
  const chosen = drawnRuns().filter(hasTimes);
  const others = state.filtered.filter((run) => !isSelected(run) && hasTimes(run));
  const shown = [...chosen, ...d3.sort(others, medianTime)].slice(0, MOST_BOXES);
  return { shown: d3.sort(shown, medianTime), total: chosen.length + others.length };
}

function distributionSection() {
  const note = h("p", { class: "note" });
  const boxesOf = () => distributionRuns().shown.map((run) => ({ run, ...box(countedTimes(run)) }));

  function draw(width) {
    const { shown, total } = distributionRuns();
    note.textContent =
      "Box: the middle half of the counted steps, with the median; whiskers: 1.5 interquartile ranges; " +
      "rings: beyond. " +
      (total > shown.length
        ? `${count(shown.length)} of ${count(total)} runs: the selected ones, then the fastest.`
        : "");
    if (!shown.length) return null;
    const rows = boxesOf();
    const room = labelRoom(
      shown.map((run) => run.name),
      width,
    );
    const colour = (row) => (isSelected(row.run) ? colourOf(row.run) : "var(--muted)");
    const id = (row) => row.run.id;
    const outliers = rows.flatMap((row) => row.outliers.map((value) => ({ run: row.run, value })));
    const text = (row) =>
      tipText(
        row.run,
        `median ${formatNumber(row.median)} s`,
        `${formatNumber(row.min)} to ${formatNumber(row.max)} s, n=${row.n}`,
      );
    return plot(width, {
      height: 60 + 26 * rows.length,
      marginLeft: room.margin,
      x: { label: "step time (s) →", grid: true, nice: true, ticks: Math.max(2, width / 140) },
      y: {
        label: null,
        domain: shown.map((run) => run.id),
        tickFormat: (run) => shorten(RUNS[run].name, room.characters),
        tickSize: 0,
      },
      marks: [
        Plot.ruleY(rows, { y: id, x1: "low", x2: "high", stroke: colour }),
        Plot.barX(rows, {
          y: id,
          x1: "q1",
          x2: "q3",
          fill: colour,
          fillOpacity: 0.3,
          stroke: colour,
          insetTop: 4,
          insetBottom: 4,
        }),
        Plot.tickX(rows, { y: id, x: "median", stroke: "var(--text)", strokeWidth: 2, insetTop: 3, insetBottom: 3 }),
        Plot.dot(outliers, { y: id, x: "value", r: 2.5, stroke: colour }),
        hover(rows, Plot.pointerY({ y: id, x: "median", title: text })),
      ],
    });
  }
  const chart = figure({
    title: "",
    draw,
    label: () => `Box plots of the step times of ${plural(distributionRuns().shown.length, "run")}; a table follows.`,
    empty: "No run that passes the filter has counted steps.",
    numbers: () => ({
      head: ["point", "n", "min", "lower quartile", "median", "upper quartile", "max"],
      rows: boxesOf().map((row) => [
        row.run.name,
        row.n,
        ...[row.min, row.q1, row.median, row.q3, row.max].map((v) => formatNumber(v, 5)),
      ]),
      numbers: [1, 2, 3, 4, 5, 6],
    }),
  });
  const element = section("distribution", "Distribution of step times per point", note, chart.element);
  return { element, onFilter: [chart.redraw], onSelection: [chart.redraw] };
}
