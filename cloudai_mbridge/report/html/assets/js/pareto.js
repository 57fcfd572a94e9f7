// Throughput against memory, and the runs that no other run beats in both.

const MOST_FRONT_ROWS = 40;

function paretoMeasures() {
  const gain = RATES.find((measure) => measured(RUNS, measure, MEASURE.peak_memory_gib).length);
  return gain ? { gain, cost: MEASURE.peak_memory_gib } : null;
}

function paretoSection() {
  const measures = paretoMeasures();
  const title = "Throughput against memory";
  if (!measures) {
    const why = "No successful run has both a throughput and a peak memory.";
    return { element: section("pareto", title, emptyLine(why)), onFilter: [], onSelection: [] };
  }
  const { gain, cost } = measures;
  const runs = () => measured(state.filtered, gain, cost);
  const others = () =>
    state.filtered.filter((run) => !succeeded(run) && isFinal(gain.of(run)) && isFinal(cost.of(run)));
  const front = () => paretoFront(runs(), cost.of, gain.of);
  const list = h("div");

  function draw(width) {
    const [all, failed, best] = [runs(), others(), front()];
    list.replaceChildren(best.length ? frontTable(best, gain, cost) : "");
    if (!all.length && !failed.length) return null;
    const tip = (run) =>
      tipText(run, `${formatNumber(gain.of(run))} ${gain.unit}`, `${formatNumber(cost.of(run))} ${cost.unit}`);
    const chosen = [...all, ...failed].filter(isSelected);
    const numbered = best.length <= 12 ? best : [];
    return plot(width, {
      height: Math.round(Math.min(440, Math.max(260, width * 0.5))),
      marginLeft: 66,
      x: {
        label: `${unitLabel(cost)} →`,
        grid: true,
        nice: true,
        ticks: Math.max(2, width / 110),
      },
      y: { label: `↑ ${unitLabel(gain)}`, grid: true, nice: true },
      marks: [
        Plot.dot(all, { x: cost.of, y: gain.of, ...dotStyle(all.length) }),
        Plot.dot(failed, { x: cost.of, y: gain.of, r: 4, symbol: "times", stroke: "var(--failed)" }),
        Plot.line(best, { x: cost.of, y: gain.of, curve: "step-after", stroke: "var(--derived)", strokeWidth: 2 }),
        Plot.dot(best, { x: cost.of, y: gain.of, r: 4.5, fill: "var(--derived)", stroke: "var(--surface)" }),
        Plot.dot(chosen, { x: cost.of, y: gain.of, r: 7, stroke: colourOf, strokeWidth: 2 }),
        Plot.text(numbered, {
          x: cost.of,
          y: gain.of,
          text: (_, i) => String(i + 1),
          dy: -12,
          fontWeight: 700,
          stroke: "var(--surface)",
          fill: "var(--text)",
          strokeWidth: 4,
        }),
        hover([...all, ...failed], Plot.pointer({ x: cost.of, y: gain.of, title: tip })),
      ],
    });
  }
  const chart = figure({
    title: "",
    draw,
    label: () =>
      `${gain.label} against ${cost.label}: ${plural(runs().length, "run")}, of which ${front().length} on the front.`,
    empty: "No row that passes the filter has both numbers.",
    numbers: () => ({
      head: ["point", "verdict", unitLabel(cost), unitLabel(gain)],
      rows: [...runs(), ...others()]
        .slice(0, 500)
        .map((run) => [run.name, run.verdict, formatNumber(cost.of(run)), formatNumber(gain.of(run))]),
      numbers: [2, 3],
      total: runs().length + others().length,
    }),
  });
  const note =
    "Line: the front, from small memory to high throughput; only successful runs are on it. " +
    "Crosses: runs that failed. Rings: selected." +
    POOLED;
  const element = section(
    "pareto",
    title,
    h("p", { class: "note" }, note),
    h("div", { class: "columns front" }, chart.element, list),
  );
  return { element, onFilter: [chart.redraw], onSelection: [chart.redraw] };
}

function frontTable(front, gain, cost) {
  const rows = front
    .slice(0, MOST_FRONT_ROWS)
    .map((run, i) => [String(i + 1), shortData(run.name, 80), formatNumber(cost.of(run)), formatNumber(gain.of(run))]);
  const rest = front.length - rows.length;
  return h(
    "div",
    {},
    h("h3", {}, "On the front"),
    region(
      "Runs on the front",
      simpleTable(["", "point", unitLabel(cost), unitLabel(gain)], rows, { numbers: [2, 3] }),
    ),
    rest > 0 ? h("p", { class: "note" }, `And ${count(rest)} more.`) : null,
  );
}
