// What each axis does to a measure: medians by value, and by how much they differ.

const MOST_DOTS = 400;

function varyingAxes(runs) {
  return AXES.filter((axis) => new Set(runs.map((run) => valueText(coordinate(run, axis)))).size > 1);
}

function sensitivityRuns(measure) {
  return measured(state.filtered, measure);
}

function axisChart(axis, measureId) {
  const effect = () => effectOf(sensitivityRuns(MEASURE[measureId()]), axis, MEASURE[measureId()]);
  function draw(width) {
    const measure = MEASURE[measureId()];
    const runs = sensitivityRuns(measure);
    if (!runs.length) return null;
    const { values } = effect();
    const text = (value) => value.text;
    const few = runs.length <= MOST_DOTS;
    const characters = Math.max(4, Math.floor((width - 60) / Math.min(values.length, 8) / 7.2));
    const tip = (value) =>
      [
        `${shorten(axis, 40)} = ${shorten(value.text, 60)}`,
        `median ${formatNumber(value.median)} ${measure.unit}, n=${value.n}`,
        `middle half ${formatNumber(value.q1)} to ${formatNumber(value.q3)}`,
      ].join("\n");
    return plot(width, {
      height: 230,
      marginLeft: 58,
      x: {
        type: "band",
        domain: values.map(text),
        label: shorten(axis, 40),
        ticks: tickValues(
          values.map(text),
          width - 60,
          7.2 *
            Math.min(
              characters,
              d3.max(values, (v) => v.text.length),
            ) +
            8,
        ),
        tickFormat: (value) => shorten(value, characters),
        padding: 0.35,
      },
      y: { label: `↑ ${unitLabel(measure)}`, grid: true, nice: true },
      marks: [
        Plot.ruleX(values, { x: text, y1: "min", y2: "max", stroke: "var(--control)" }),
        Plot.barY(values, {
          x: text,
          y1: "q1",
          y2: "q3",
          fill: "var(--data)",
          fillOpacity: 0.22,
          stroke: "var(--data)",
        }),
        few
          ? Plot.dot(runs, {
              x: (run) => valueText(coordinate(run, axis)),
              y: measure.of,
              r: 1.8,
              fill: "var(--muted)",
            })
          : null,
        Plot.lineY(values, { x: text, y: "median", stroke: "var(--derived)", strokeDasharray: "4 3" }),
        Plot.tickY(values, { x: text, y: "median", stroke: "var(--derived)", strokeWidth: 3 }),
        hover(values, Plot.pointerX({ x: text, y: "median", title: tip })),
      ],
    });
  }
  return figure({
    title: axis,
    draw,
    label: () => `${MEASURE[measureId()].label} by ${axis}: the medians differ by ${formatShare(effect().effect)}.`,
    empty: "No successful run that passes the filter has this measure.",
    numbers: () => ({
      head: [axis, "n", "min", "lower quartile", "median", "upper quartile", "max"],
      rows: effect().values.map((v) => [
        v.text,
        v.n,
        ...[v.min, v.q1, v.median, v.q3, v.max].map((x) => formatNumber(x, 5)),
      ]),
      numbers: [1, 2, 3, 4, 5, 6],
    }),
  });
}

function effectTable() {
  const measures = MEASURES.filter((measure) => measured(RUNS, measure).length);
  const effects = AXES.map((axis) => [
    axis,
    measures.map((measure) => effectOf(sensitivityRuns(measure), axis, measure)),
  ]);
  const size = ([, list]) => list[0]?.effect ?? -1;
  const cell = (effect) => numberCell(effect.effect === null ? null : NaN, "fewer than two values were measured");
  const rows = d3
    .sort(effects, (entry) => -size(entry))
    .map(([axis, list]) => [
      shortData(axis, 60),
      ...list.map((effect) => (effect.effect === null ? cell(effect) : formatShare(effect.effect))),
      list.some((effect) => isUneven(effect)) ? "no" : "yes",
    ]);
  const head = ["axis", ...measures.map((measure) => measure.label), "same n at every value"];
  return region("Effect of each axis", simpleTable(head, rows, { numbers: d3.range(1, measures.length + 1) }));
}

function isUneven(effect) {
  return new Set(effect.values.map((value) => value.n)).size > 1;
}

function sensitivitySection() {
  const note =
    "Effect: how far the medians by value are apart, relative to the median of all. Only successful runs " +
    "count. Where values were not measured equally often, rejected or failed points are missing, " +
    "and an axis may show what another one causes. So it may where axes change together: " +
    "equal counts do not exclude that." +
    POOLED;
  const axes = varyingAxes(RUNS.filter(succeeded));
  const available = MEASURES.filter((measure) => measured(RUNS, measure).length);
  if (!axes.length || !available.length) {
    const why = axes.length
      ? "No successful run has measured anything."
      : "No coordinate differs between the successful runs: there is no axis to compare.";
    return { element: section("sensitivity", "Axis sensitivity", emptyLine(why)), onFilter: [], onSelection: [] };
  }
  let measure = available[0].id;
  const charts = axes.map((axis) => axisChart(axis, () => measure));
  const redraw = () => charts.forEach((chart) => chart.redraw());
  const table = h("div");
  const fill = () => table.replaceChildren(effectTable());
  const choose = picker(
    available.map(({ id, label }) => [id, label]),
    measure,
    (value) => ((measure = value), redraw()),
  );
  const element = section(
    "sensitivity",
    "Axis sensitivity",
    h("p", { class: "note" }, note),
    table,
    h("div", { class: "controls no-print" }, field("Charts show", choose)),
    h(
      "div",
      { class: "small-columns" },
      charts.map((chart) => chart.element),
    ),
  );
  return { element, onFilter: [fill, ...charts.map((chart) => chart.redraw)], onSelection: [] };
}
