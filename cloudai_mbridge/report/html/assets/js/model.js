// The report's data as the page uses it: one object per run, rejected points included.

const DATA = JSON.parse(document.getElementById("data").textContent);
const HEAD = DATA.head;
const AXES = DATA.axes;

// The measures of a run; each is a column of the table. `of` is one number per run: the capped mean of a statistic,
// since single slow steps are not a property of a run.
const MEASURES = DATA.measures.map((measure) => ({
  ...measure,
  of: (run) => (run.statistics[measure.id] ? run.statistics[measure.id].capped_mean : toNumber(run[measure.id])),
}));
const MEASURE = Object.fromEntries(MEASURES.map((measure) => [measure.id, measure]));
// Rates, those derived from a number of tokens first, since step times of different batches do not compare.
const RATES = d3.sort(
  MEASURES.filter((measure) => measure.rate),
  (measure) => !measure.derived,
);

function unitLabel(measure) {
  return measure.unit === measure.label ? measure.label : `${measure.label} (${measure.unit})`;
}

function readStatistic(values) {
  return Object.fromEntries(values.map((value, i) => [DATA.statistic[i], toNumber(value)]));
}

function readRun(run, id) {
  const { first, numbers, times, losses } = run.steps;
  return {
    ...run,
    id,
    name: nameOf(run),
    point: `${run.test_id}/${run.label}`,
    statistics: Object.fromEntries(
      Object.entries(run.statistics).map(([name, values]) => [name, readStatistic(values)]),
    ),
    losses: run.losses.map(toNumber),
    steps: {
      numbers: first === null ? numbers : times.map((_, i) => first + i),
      times: times.map(toNumber),
      losses: losses.map(toNumber),
    },
  };
}

const severalTests = new Set(DATA.runs.map((run) => run.test_id)).size > 1;
const POOLED = severalTests ? " The runs of all tests are pooled here: filter by test to compare like with like." : "";
const severalIterations = DATA.runs.some((run) => run.iteration);

function nameOf(run) {
  const name = severalTests ? `${run.test_id}/${run.label}` : run.label;
  return severalIterations && run.verdict !== "rejected" ? `${name}/${run.iteration}` : name;
}

const RUNS = DATA.runs.map(readRun);
const OFTEN_NONE = ["cancelled", "unfinished"];
const VERDICTS = ["success", "failed", "skipped", "cancelled", "unfinished", "rejected"].filter(
  (verdict) => !OFTEN_NONE.includes(verdict) || RUNS.some((run) => run.verdict === verdict),
);

// Why a number is not there.
function whyMissing(run, name) {
  if (run.verdict === "rejected") return "the point was rejected and did not run";
  if (run.verdict === "skipped") return "the run was skipped";
  if (run.verdict === "cancelled") return "the run was cancelled";
  if (run.verdict === "unfinished") return "the run has not ended";
  if (!run.steps.times.length) return "no step was logged";
  if (name === "peak_memory_gib") return "the log tells no memory";
  if (name === "tokens_per_s_per_gpu" && run.statistics.step_time_s) return "the tokens per step are not known";
  if (!run.window) return "no step was logged after the warm-up";
  return "a counted step lacks it, or it is not finite";
}

function succeeded(run) {
  return run.verdict === "success";
}

function hasMeasured(run, ...measures) {
  return succeeded(run) && measures.every((measure) => isFinal(measure.of(run)));
}

// Checks of nodes are not points of the sweep.
function measured(runs, ...measures) {
  return runs.filter((run) => !run.is_pre_test && hasMeasured(run, ...measures));
}

function valueText(value) {
  if (value === null || value === undefined) return DASH;
  return typeof value === "string" ? value : Array.isArray(value) ? value.map(valueText).join(", ") : String(value);
}

function coordinate(run, axis) {
  return Object.hasOwn(run.coordinates, axis) ? run.coordinates[axis] : null;
}

// For sorting: numbers stay numbers, everything else is text.
function coordinateKey(run, axis) {
  const value = coordinate(run, axis);
  return value === null || typeof value === "number" ? value : valueText(value);
}

// The values of an axis among the runs, in order, as texts.
function axisValues(runs, axis) {
  const keys = new Map(runs.map((run) => [valueText(coordinate(run, axis)), coordinateKey(run, axis)]));
  return [...keys].sort((a, b) => compareCells(a[1], b[1], 1)).map(([text]) => text);
}
