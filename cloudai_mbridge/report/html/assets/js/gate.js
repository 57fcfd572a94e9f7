// What the gate said: the worst first, the good in short.

const GATE_ORDER = ["regression", "not run", "incomplete", "not comparable", "inconclusive", "improvement", "pass"];
const MOST_GATE_ROWS = 300;

// A point of which some runs were good is not one that was not run.
function verdictOf(point) {
  return point.verdict === "not run" && (point.runs ?? []).length ? "incomplete" : point.verdict;
}

function gateSection() {
  const gate = DATA.gate;
  if (!gate) return null;
  const rank = (verdict) => GATE_ORDER.indexOf(verdict);
  const points = d3.sort(gate.points, (a, b) => rank(verdictOf(a)) - rank(verdictOf(b)));
  const counts = d3.rollup(
    points,
    (group) => group.length,
    verdictOf,
  );
  const summary = GATE_ORDER.filter((verdict) => counts.has(verdict)).map(
    (verdict) => `${count(counts.get(verdict))} ${verdict}`,
  );
  const badge = verdictMark(gate.verdict);
  badge.classList.add("badge");
  return section(
    "gate",
    "Gate",
    h("p", {}, badge),
    h("p", {}, `${plural(points.length, "point")}: ${summary.join(", ") || "none"}.`),
    h(
      "dl",
      { class: "facts" },
      fact("policy", gate.policy),
      fact("compared with", gate.reference),
      fact(
        "chance of a false alarm",
        `at most ${formatShare(toNumber(gate.false_alarm_rate), 2)} over all metrics together`,
      ),
    ),
    (gate.notes ?? []).map((note) => h("p", { class: "note" }, data(note))),
    environmentChanges(gate.environment_changes ?? {}),
    pointWords(points),
    metricTable([...(gate.shared ?? []), ...points]),
  );
}

function environmentChanges(changes) {
  const names = Object.keys(changes);
  if (!names.length) return null;
  const rows = names.map((name) => [name, valueText(changes[name])]);
  return h(
    "div",
    {},
    h("h3", {}, "What changed in the environment"),
    region("Environment changes", simpleTable(["field", "change"], rows)),
  );
}

function pointWords(points) {
  const told = points.filter((point) => point.words.length);
  const item = (point) =>
    h("li", {}, verdictMark(verdictOf(point)), " ", shortData(point.point, 80), ": ", data(point.words.join("; ")));
  return told.length ? gradually(told, item, 50, "points with remarks", "ul") : null;
}

function metricTable(points) {
  const flat = points.flatMap((point) => point.metrics.map((metric) => [point, metric]));
  const rank = ([, metric]) => (metric.decides ? 0 : 10) + GATE_ORDER.indexOf(metric.verdict);
  const rows = d3
    .sort(flat, rank)
    .slice(0, MOST_GATE_ROWS)
    .map(([point, metric]) => metricRow(point, metric));
  if (!rows.length) return emptyLine("No metric was compared.");
  const head = ["point", "metric", "verdict", "baseline", "result", "change", "interval", "runs", "in words"];
  const rest = flat.length - rows.length;
  return h(
    "div",
    {},
    region("Metrics of the gate, may scroll", simpleTable(head, rows, { numbers: [3, 4, 5, 6, 7] })),
    rest > 0
      ? h("p", { class: "note" }, `${count(rest)} more, none worse than these, are in the gate's own output.`)
      : null,
  );
}

function metricRow(point, metric) {
  const [baseline, value, change] = [metric.baseline, metric.value, metric.change].map(toNumber);
  const interval = metric.interval ? metric.interval.map((bound) => formatChange(toNumber(bound))).join(" … ") : DASH;
  const words = h("span", {}, data(metric.words), metric.waived ? data(` Waived: ${metric.waived}`) : null);
  return [
    shortData(point.point, 60),
    `${metric.metric}${metric.unit ? ` (${metric.unit})` : ""}${metric.decides ? "" : ", shown only"}`,
    verdictMark(metric.verdict),
    numberCell(baseline, "no single number, or no baseline"),
    numberCell(value, "no single number, or not measured"),
    formatChange(change),
    h("span", { title: metric.confidence ? `${formatShare(metric.confidence, 0)} confidence` : "" }, interval),
    `${metric.num_runs} vs. ${metric.num_baseline_runs}`,
    words,
  ];
}
