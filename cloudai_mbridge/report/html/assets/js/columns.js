// The columns of the table: what each sorts by, and what it shows.

const SEVERITY = { failed: 0, cancelled: 1, skipped: 2, unfinished: 3, rejected: 4, success: 5 };
const AFTER_SUCCESS = ["success", "failed", "unfinished", "cancelled", "skipped", "rejected"];

function measureColumn(measure) {
  return {
    id: measure.id,
    title: measure.title,
    kind: "number",
    key: (run) => (succeeded(run) ? measure.of(run) : null),
    cell: (run) =>
      numberCell(measure.of(run), whyMissing(run, measure.id), spreadOf(run.statistics[measure.id])),
  };
}

// A single step has no spread.
function spreadOf(statistic) {
  return statistic?.n > 1 ? statistic.capped_std : null;
}

function lossCell(run) {
  const [first, last] = run.losses;
  if (first === null && last === null) return numberCell(null, whyMissing(run, "loss"));
  return h(
    "span",
    {},
    numberCell(first, "no loss at the first step"),
    " → ",
    numberCell(last, "no loss at the last step"),
  );
}

function stepsText(run) {
  return run.verdict === "rejected" ? null : `${run.steps.times.length}/${run.num_steps ?? "?"}`;
}

function axisColumn(axis) {
  const cell = (run) => {
    const value = coordinate(run, axis);
    return value === null ? numberCell(null, "the point has no such coordinate") : shortData(valueText(value), 40);
  };
  return { id: `axis:${axis}`, title: axis, kind: "axis", key: (run) => coordinateKey(run, axis), cell };
}

function logColumn() {
  const cell = (run) => (run.logs.length ? logLinks(run) : numberCell(null, "no log"));
  return { id: "logs", title: "logs", kind: "no-print", key: (run) => run.logs.length || null, cell };
}

// To the files themselves, relative to the page: only those are listed that existed when it was written.
function logLinks(run) {
  const link = ({ name, href }) =>
    h("a", { href }, data(name), h("span", { class: "hidden" }, ` of ${shorten(run.name, 60)}`));
  return h("span", { class: "logs" }, run.logs.map((log, i) => [i ? " " : null, link(log)]));
}

const COLUMNS = [
  { id: "name", title: "point", kind: "name", key: (run) => run.name, cell: (run) => shortData(run.name, 90) },
  {
    id: "verdict",
    title: "verdict",
    kind: "",
    key: (run) => SEVERITY[run.verdict],
    cell: (run) => verdictMark(run.verdict),
  },
  {
    id: "steps",
    title: "steps",
    kind: "number",
    key: (run) => (run.verdict === "rejected" ? null : run.steps.times.length),
    cell: (run) => (stepsText(run) ? h("span", {}, stepsText(run)) : numberCell(null, whyMissing(run, "steps"))),
  },
  ...MEASURES.map(measureColumn),
  { id: "loss", title: "loss, first → last", kind: "number", key: (run) => run.losses[1], cell: lossCell },
  {
    id: "nodes",
    title: "nodes",
    kind: "nodes",
    key: (run) => run.nodes.join(" ") || null,
    cell: (run) => (run.nodes.length ? shortData(run.nodes.join(" "), 30) : numberCell(null, "the run names no node")),
  },
  ...AXES.map(axisColumn),
  ...(RUNS.some((run) => run.logs.length) ? [logColumn()] : []),
];
