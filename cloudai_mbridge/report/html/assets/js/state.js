// What the reader has chosen. Those who show it subscribe.

const MOST_CURVES = 24;
const COLOURS = 5;
const DASHES = [null, "7 3", "2 3", "9 3 2 3", "14 4"];
const state = { filtered: RUNS, slots: new Map(), printing: false };
const listeners = { filter: [], selection: [] };

function on(event, listener) {
  listeners[event].push(listener);
}

function emit(event) {
  for (const listener of listeners[event]) listener();
}

function isSelected(run) {
  return state.slots.has(run.id);
}

// A run keeps its colour while it is selected: it holds the lowest slot that was free.
function setSelected(run, selected) {
  if (!selected) state.slots.delete(run.id);
  else if (!isSelected(run)) {
    const taken = new Set(state.slots.values());
    let slot = 0;
    while (taken.has(slot)) slot += 1;
    state.slots.set(run.id, slot);
  }
}

function selectOnly(runs) {
  state.slots.clear();
  runs.forEach((run) => setSelected(run, true));
  emit("selection");
}

function selectedRuns() {
  return [...state.slots].sort((a, b) => a[1] - b[1]).map(([id]) => RUNS[id]);
}

function drawnRuns() {
  return selectedRuns()
    .filter((run) => run.steps.times.length)
    .slice(0, MOST_CURVES);
}

function colourOf(run) {
  return `var(--series-${state.slots.get(run.id) % COLOURS})`;
}

function dashOf(run) {
  return DASHES[Math.floor(state.slots.get(run.id) / COLOURS) % DASHES.length];
}

// The best few by throughput.
function bestRuns(runs, number) {
  const measure = [...RATES, MEASURE.step_time_s].find((candidate) => measured(runs, candidate).length);
  const sign = measure?.better === "lower" ? 1 : -1;
  const good = measure ? d3.sort(measured(runs, measure), (run) => sign * measure.of(run)) : [];
  return (good.length ? good : runs.filter((run) => run.steps.times.length)).slice(0, number);
}

// Redraw in pieces, so that typing stays smooth while thousands of points are drawn.
let busy = 0;

function later(tasks) {
  let pending = null;
  return () => {
    if (pending === null) busy += 1;
    clearTimeout(pending);
    document.documentElement.dataset.state = "busy";
    const queue = [...tasks];
    const next = () => {
      queue.shift()?.();
      if (queue.length) pending = setTimeout(next, 0);
      else {
        pending = null;
        busy -= 1;
        if (!busy) document.documentElement.dataset.state = "ready";
      }
    };
    pending = setTimeout(next, 120);
  };
}
