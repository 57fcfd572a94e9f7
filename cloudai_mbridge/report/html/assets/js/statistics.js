// Order statistics over small arrays.

function five(values) {
  const sorted = Float64Array.from(values).sort();
  const at = (share) => d3.quantileSorted(sorted, share);
  return {
    n: sorted.length,
    min: sorted[0],
    q1: at(0.25),
    median: at(0.5),
    q3: at(0.75),
    max: sorted[sorted.length - 1],
  };
}

// Whiskers reach the last value within 1.5 interquartile ranges of the box, as Tukey drew them.
function box(values) {
  const summary = five(values);
  const reach = 1.5 * (summary.q3 - summary.q1);
  const inside = values.filter((value) => value >= summary.q1 - reach && value <= summary.q3 + reach);
  return {
    ...summary,
    low: d3.min(inside),
    high: d3.max(inside),
    outliers: values.filter((value) => value < summary.q1 - reach || value > summary.q3 + reach),
  };
}

function countedTimes(run) {
  const leftOut = new Set(run.steps.left_out);
  const isCounted = (step) => step > run.warmup_steps && !leftOut.has(step);
  return run.steps.times.filter((time, i) => isCounted(run.steps.numbers[i]) && isFinal(time));
}

const medians = new Map();

function medianTime(run) {
  if (!medians.has(run.id)) medians.set(run.id, d3.median(countedTimes(run)));
  return medians.get(run.id);
}

// Keep the extremes of each stretch, so that a long curve keeps its spikes.
function thin(points, most) {
  if (points.length <= most) return points;
  const stretch = Math.ceil((2 * points.length) / most);
  const kept = [];
  for (let start = 0; start < points.length; start += stretch) {
    const part = points.slice(start, start + stretch);
    const finite = part.filter((point) => isFinal(point.y));
    const odd = part.find((point) => !isFinal(point.y));
    const extremes = finite.length ? [d3.least(finite, (p) => p.y), d3.greatest(finite, (p) => p.y)] : [];
    kept.push(...new Set([...extremes, odd].filter(Boolean).sort((a, b) => a.x - b.x)));
  }
  return kept;
}

// Medians of a measure by the values of an axis, and by how much they differ.
function effectOf(runs, axis, measure) {
  const groups = d3.group(runs, (run) => valueText(coordinate(run, axis)));
  const values = axisValues(runs, axis).map((text) => ({ text, ...five(groups.get(text).map(measure.of)) }));
  const medians = values.map((value) => value.median);
  const middle = d3.median(runs, measure.of);
  return {
    axis,
    values,
    effect: values.length > 1 && middle ? (d3.max(medians) - d3.min(medians)) / Math.abs(middle) : null,
  };
}

// Runs that no other run beats in both: more of `gain` for less of `cost`. In order of cost.
function paretoFront(runs, cost, gain) {
  const front = [];
  for (const run of d3.sort(runs, cost, (other) => -gain(other))) {
    if (!front.length || gain(run) > gain(front[front.length - 1])) front.push(run);
  }
  return front;
}
