// Step time and loss over the steps of the selected runs.

const LARGE_SPREAD = 10;
const DWARFED = 1.5;

function curveOf(run, column) {
  const points = run.steps.numbers.map((x, i) => ({ x, y: run.steps[column][i], run }));
  return thin(points, 2000);
}

function warmUp(curves) {
  const last = d3.max(curves, (curve) => curve.run.warmup_steps) ?? 0;
  const first = d3.min(curves, (curve) => curve.points[0]?.x) ?? 1;
  return last >= first ? { first: first - 0.5, last: last + 0.5 } : null;
}

function isSpread(values) {
  const positive = values.filter((value) => value > 0);
  return positive.length > 1 && d3.max(positive) / d3.min(positive) > LARGE_SPREAD;
}

// How the values are drawn. Unless the reader decides: first steps that dwarf the others are left beyond the frame.
function scaleFor(curves, shade, chosen, column) {
  const valuesOf = (keep) =>
    curves.flatMap((curve) => curve.points.filter(keep).map((point) => point.y)).filter(isFinal);
  const all = valuesOf(() => true);
  const counted = shade ? valuesOf((point) => point.x > shade.last) : [];
  const dwarfed = column === "times" && d3.max(all) > DWARFED * (d3.max(counted) ?? Infinity);
  const spread = isSpread(counted.length && dwarfed ? counted : all);
  const name = chosen ?? (spread ? "log" : dwarfed ? "counted" : "linear");
  if (name !== "counted" || !counted.length) return { log: name === "log" };
  return { log: false, domain: padded(d3.extent(counted)), beyond: d3.max(all) > d3.max(counted) ? d3.max(all) : null };
}

function padded([low, high]) {
  const room = 0.08 * (high - low || Math.abs(high) || 1);
  return [low - room, high + room];
}

function curveMarks(curves, log, clip) {
  const drawable = (point) => isFinal(point.y) && (!log || point.y > 0);
  const all = curves.flatMap((curve) => curve.points);
  const odd = all.filter((point) => point.y !== null && !isFinal(point.y));
  const unit = (point) => `step ${point.x}: ${formatNumber(point.y)}`;
  return [
    ...curves.map(({ run, points }) =>
      Plot.line(points, {
        x: "x",
        y: (point) => (drawable(point) ? point.y : NaN),
        stroke: colourOf(run),
        strokeDasharray: dashOf(run),
        strokeWidth: 1.8,
        clip,
      }),
    ),
    ...curves
      .filter(({ points }) => points.length < 3)
      .map(({ run, points }) => Plot.dot(points.filter(drawable), { x: "x", y: "y", fill: colourOf(run), r: 3 })),
    Plot.dot(odd, {
      x: "x",
      frameAnchor: "top",
      dy: 6,
      symbol: "times",
      stroke: (point) => colourOf(point.run),
      strokeWidth: 2,
      r: 5,
    }),
    hover(all.filter(drawable), Plot.pointer({ x: "x", y: "y", title: (point) => tipText(point.run, unit(point)) })),
  ];
}

function curveFigure(title, column, unit) {
  let scale = null;
  const curves = () => drawnRuns().map((run) => ({ run, points: curveOf(run, column) }));

  function draw(width) {
    const list = curves();
    const points = list.flatMap((curve) => curve.points);
    if (!points.some((point) => isFinal(point.y))) return null;
    const shade = warmUp(list);
    const { log, domain, beyond } = scaleFor(list, shade, scale, column);
    const axis = { label: `↑ ${unit}`, type: log ? "log" : "linear", grid: true, nice: !domain, domain };
    const text = () => (beyond ? `warm-up, up to ${formatNumber(beyond, 3)}` : "warm-up");
    const words = { x: "first", frameAnchor: "top-left", dx: 5, dy: 7, text, fill: "var(--text)" };
    return plot(width, {
      marginLeft: 58,
      x: stepAxis(width, points),
      y: { ...axis, ...(log && LOG_TICKS) },
      marks: [
        shade ? Plot.rectX([shade], { x1: "first", x2: "last", fill: "var(--shade)" }) : null,
        Plot.frame({ stroke: "var(--line)" }),
        ...curveMarks(list, log, Boolean(domain)),
        shade ? Plot.text([shade], { ...words, stroke: "var(--surface)", strokeWidth: 4 }) : null,
      ],
    });
  }
  const result = figure({
    title,
    draw,
    label: () => `${title} of ${plural(drawnRuns().length, "run")} by step; the numbers follow as a table.`,
    empty: () =>
      drawnRuns().length
        ? `The selected runs have no ${column === "losses" ? "finite loss" : "step time"}.`
        : "No run with steps is selected.",
    numbers: () => curveNumbers(curves()),
  });
  const options = [
    ["", "automatic"],
    ["linear", "linear"],
    ["log", "logarithmic"],
    ["counted", "without warm-up"],
  ];
  const choose = picker(options, "", (value) => ((scale = value || null), result.redraw()));
  result.element.querySelector("figcaption").append(h("div", { class: "controls no-print" }, field("Scale", choose)));
  result.element.append(oddNotes(column));
  return result;
}

// Two digits, and no prefixes that need explaining.
function formatTick(value) {
  return formatNumber(value, 2);
}

const LOG_TICKS = { tickFormat: formatTick, ticks: 5 };

// A NaN is not a gap to be overlooked: say where it begins.
function oddNotes(column) {
  const list = h("ul", { class: "odd" });
  const refresh = () => {
    const found = drawnRuns().flatMap((run) => {
      const at = run.steps[column].findIndex((value) => value !== null && !isFinal(value));
      return at < 0
        ? []
        : [
            h(
              "li",
              {},
              shortData(run.name, 60),
              `: ${formatNumber(run.steps[column][at])} from step ${run.steps.numbers[at]}`,
            ),
          ];
    });
    list.replaceChildren(...found);
    list.hidden = !found.length;
  };
  on("selection", refresh);
  refresh();
  return list;
}

function curveNumbers(curves) {
  const all = [...new Set(curves.flatMap((curve) => curve.points.map((point) => point.x)))].sort((a, b) => a - b);
  const columns = curves.map((curve) => new Map(curve.points.map((point) => [point.x, point.y])));
  const rows = all
    .slice(0, 500)
    .map((step) => [String(step), ...columns.map((column) => formatNumber(column.get(step), 6))]);
  const head = ["step", ...curves.map((curve) => shorten(curve.run.name, 40))];
  return { head, rows, numbers: d3.range(1, head.length), total: all.length };
}

function curvesSection() {
  const panel = selectionPanel();
  const time = curveFigure("Step time", "times", "step time (s)");
  const loss = curveFigure("Loss", "losses", "loss");
  const element = section(
    "curves",
    "Step time and loss",
    panel.element,
    h("div", { class: "columns" }, time.element, loss.element),
  );
  return { element, refresh: panel.refresh, onSelection: [time.redraw, loss.redraw], onFilter: [] };
}
