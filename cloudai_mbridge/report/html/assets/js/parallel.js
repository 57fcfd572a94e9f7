// Parallel coordinates: every run is a line across its coordinates and what came of it.
// Drawn by hand: lines of one class share a few paths, so that thousands of runs are a few dozen elements.

const CLASSES = 5;
const LINES_PER_PATH = 40;
const AXIS_WIDTH = 96;
const AXIS_HEIGHT = 72;
const TICK_LENGTH = 11;
const NONE_ROOM = 34;

function parallelAxes(runs) {
  const ordinal = varyingAxes(runs).map((axis) => ({
    title: axis,
    values: axisValues(runs, axis),
    of: (run) => valueText(coordinate(run, axis)),
  }));
  const numeric = MEASURES.filter((measure) => !measure.derived)
    .filter((measure) => runs.some((run) => isFinal(measure.of(run))))
    .map((measure) => ({ title: unitLabel(measure), measure, of: (run) => measure.of(run) }));
  return [...ordinal, ...numeric];
}

function scaleOf(axis, runs, low, high, labelRoom) {
  if (axis.values)
    return {
      at: d3.scalePoint(axis.values, [low, high]).padding(0.2),
      ticks: tickValues(axis.values, Math.abs(high - low), labelRoom),
    };
  const lowest = low + NONE_ROOM * Math.sign(high - low);
  const at = d3.scaleLinear(d3.extent(runs.map(axis.of).filter(isFinal)), [lowest, high]).nice(5);
  return { at, ticks: at.ticks(5), format: at.tickFormat(5), none: low, lowest };
}

function placeOf(axis, run) {
  const value = axis.of(run);
  if (axis.values) return axis.scale.at(value);
  return isFinal(value) ? axis.scale.at(value) : axis.scale.none;
}

// Successful runs by fifths of step time, the others by verdict.
function classify(runs) {
  const good = measured(runs, MEASURE.step_time_s);
  const cuts = d3.scaleQuantile(good.map(MEASURE.step_time_s.of), d3.range(CLASSES));
  const known = new Set(good);
  return d3.group(runs, (run) => (known.has(run) ? cuts(MEASURE.step_time_s.of(run)) : run.verdict));
}

const LINE_STYLES = {
  rejected: { stroke: "var(--rejected)", dash: "1 4", opacity: 0.5, text: "rejected" },
  skipped: { stroke: "var(--skipped)", dash: "2 3", opacity: 0.8, text: "skipped" },
  cancelled: { stroke: "var(--skipped)", dash: "4 2 1 2", opacity: 0.8, text: "cancelled" },
  unfinished: { stroke: "var(--skipped)", dash: "1 4", opacity: 0.8, text: "unfinished" },
  failed: { stroke: "var(--failed)", dash: "6 3", opacity: 0.8, text: "failed" },
  success: { stroke: "var(--muted)", dash: null, opacity: 0.5, text: "success without step time" },
  0: { stroke: "var(--class-0)", dash: null, opacity: 0.7, text: "fastest fifth" },
  1: { stroke: "var(--class-1)", dash: null, opacity: 0.6, text: "fast" },
  2: { stroke: "var(--class-2)", dash: null, opacity: 0.5, text: "middle" },
  3: { stroke: "var(--class-3)", dash: null, opacity: 0.6, text: "slow" },
  4: { stroke: "var(--class-4)", dash: null, opacity: 0.7, text: "slowest fifth" },
};
const DRAWING_ORDER = ["rejected", "unfinished", "cancelled", "skipped", "failed", "success", 2, 3, 1, 4, 0];

// Where the axes do not fit beside each other, they lie one below the other.
function layout(width, number) {
  const lying = width < 60 + AXIS_WIDTH * number;
  const height = lying ? 40 + AXIS_HEIGHT * number : 360;
  const across = lying
    ? d3.scalePoint(d3.range(number), [40, height - 40])
    : d3.scalePoint(d3.range(number), [70, width - 70]);
  return { lying, height, across, low: lying ? 20 : 336, high: lying ? width - 40 : 44 };
}

function drawParallel(width, runs, axes) {
  const { lying, height, across, low, high } = layout(width, axes.length);
  axes.forEach((axis) => (axis.scale = scaleOf(axis, runs, low, high, lying ? 48 : 15)));
  const svg = d3
    .create("svg")
    .attr("width", width)
    .attr("height", height)
    .attr("viewBox", `0 0 ${width} ${height}`)
    .style("font-size", `${FONT_SIZE}px`);
  const point = (axis, i, run) => {
    const place = [across(i).toFixed(1), placeOf(axis, run).toFixed(1)];
    return (lying ? place.reverse() : place).join(",");
  };
  const line = (run) => `M${axes.map((axis, i) => point(axis, i, run)).join("L")}`;
  const groups = classify(runs);
  const thickness = runs.length > 500 ? 0.6 : 1.3;
  for (const name of DRAWING_ORDER) {
    const lines = (groups.get(name) ?? []).map(line);
    for (let i = 0; i < lines.length; i += LINES_PER_PATH) {
      addPath(svg, lines.slice(i, i + LINES_PER_PATH).join(""), LINE_STYLES[name], thickness);
    }
  }
  for (const run of drawnRuns().filter((candidate) => runs.includes(candidate))) {
    addPath(svg, line(run), { stroke: colourOf(run), dash: dashOf(run), opacity: 1 }, 3)
      .append("title")
      .text(run.name);
  }
  axes.forEach((axis, i) => {
    const move = lying ? `translate(0,${across(i)})` : `translate(${across(i)},0)`;
    const group = svg.append("g").attr("transform", move);
    if (lying) addLyingAxis(group, axis, low, high);
    else addAxis(group, axis, low, high, across.step());
  });
  return svg.node();
}

function addPath(svg, path, style, width) {
  return svg
    .append("path")
    .attr("d", path)
    .attr("fill", "none")
    .attr("stroke", style.stroke)
    .attr("stroke-width", width)
    .attr("stroke-dasharray", style.dash)
    .attr("stroke-opacity", style.opacity);
}

function addAxis(group, axis, low, high, spacing) {
  const from = axis.scale.lowest ?? low;
  group.append("line").attr("y1", high).attr("y2", from).attr("stroke", "var(--control)");
  addText(group, axis.title, Math.floor(spacing / 7.8))
    .attr("y", high - 20)
    .attr("text-anchor", "middle")
    .attr("font-weight", 600);
  for (const [y, text] of labelsOf(axis)) {
    addText(group, text, TICK_LENGTH).attr("x", 7).attr("y", y).attr("dy", "0.32em");
    group.append("line").attr("x2", 5).attr("y1", y).attr("y2", y).attr("stroke", "var(--control)");
  }
}

function addLyingAxis(group, axis, low, high) {
  const from = axis.scale.lowest ?? low;
  group.append("line").attr("x1", from).attr("x2", high).attr("stroke", "var(--control)");
  addText(group, axis.title, 44).attr("y", -10).attr("font-weight", 600);
  for (const [x, text] of labelsOf(axis)) {
    addText(group, text, TICK_LENGTH).attr("x", x).attr("y", 16).attr("text-anchor", "middle");
    group.append("line").attr("y2", 5).attr("x1", x).attr("x2", x).attr("stroke", "var(--control)");
  }
}

// Where on the axis which texts stand.
function labelsOf(axis) {
  const { at, ticks, format, none } = axis.scale;
  const labels = ticks.map((tick) => [at(tick), axis.values ? tick : format(tick)]);
  return axis.values ? labels : [...labels, [none, "none"]];
}

function addText(group, text, length) {
  const words = group
    .append("text")
    .attr("paint-order", "stroke")
    .attr("stroke", "var(--surface)")
    .attr("stroke-width", 4)
    .attr("stroke-linejoin", "round")
    .text(shorten(text, length));
  words.append("title").text(text);
  return words;
}

function parallelLegend(runs) {
  const groups = classify(runs);
  const names = [...d3.range(CLASSES), ...VERDICTS].filter((name) => groups.has(name));
  return legend(
    names.map((name) => [
      LINE_STYLES[name].stroke,
      LINE_STYLES[name].dash,
      `${LINE_STYLES[name].text} (${count(groups.get(name).length)})`,
    ]),
  );
}

function points() {
  return state.filtered.filter((run) => !run.is_pre_test);
}

function parallelSection() {
  const key = h("div");
  function draw(width) {
    const runs = points();
    const axes = parallelAxes(runs);
    key.replaceChildren(axes.length > 1 && runs.length ? parallelLegend(runs) : "");
    return axes.length > 1 && runs.length ? drawParallel(width, runs, axes) : null;
  }
  const chart = figure({
    title: "",
    draw,
    label: () =>
      `Parallel coordinates of ${plural(points().length, "run")} over ${parallelAxes(points())
        .map((axis) => axis.title)
        .join(", ")}.`,
    empty: "Fewer than two things vary among the rows that pass the filter.",
    numbers: () => parallelNumbers(),
  });
  const note =
    "Colour: fifths of step time. What did not succeed is dashed or dotted, and where a number is " +
    "missing the line ends at “none”. Selected runs are thick.";
  const element = section("parallel", "Parallel coordinates", h("p", { class: "note" }, note), key, chart.element);
  return { element, onFilter: [chart.redraw], onSelection: [chart.redraw] };
}

function parallelNumbers() {
  const axes = parallelAxes(points());
  const text = (axis, run) => (axis.values ? axis.of(run) : formatNumber(axis.of(run)));
  const rows = points()
    .slice(0, 200)
    .map((run) => [run.name, run.verdict, ...axes.map((axis) => text(axis, run))]);
  return { head: ["point", "verdict", ...axes.map((axis) => axis.title)], rows, total: points().length };
}
