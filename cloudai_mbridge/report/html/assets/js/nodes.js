// Nodes against each other: runs of equal points, relative to the median of those.

const MOST_NODES = 40;

// Equal: the same point, and the same of all that must be equal for a comparison. Checks of nodes are one point.
function equalPoints(run) {
  return run.is_pre_test ? `checks ${run.test_id}` : `${run.point} ${run.comparability ?? ""}`;
}

// Says nothing unless at least two different nodes ran them.
function relativeTimes(runs) {
  if (new Set(runs.map((run) => run.nodes.join(" "))).size < 2) return [];
  const middle = d3.median(runs, MEASURE.step_time_s.of);
  return runs.flatMap((run) => run.nodes.map((node) => ({ node, ratio: MEASURE.step_time_s.of(run) / middle - 1 })));
}

function nodeRatios() {
  const runs = state.filtered.filter((run) => run.nodes.length && hasMeasured(run, MEASURE.step_time_s));
  const ratios = [...d3.group(runs, equalPoints).values()].flatMap(relativeTimes);
  const median = (list) => d3.median(list, (entry) => entry.ratio);
  const nodes = [...d3.group(ratios, (entry) => entry.node)].map(([node, list]) => ({
    node,
    list,
    median: median(list),
  }));
  return d3.sort(nodes, (entry) => -entry.median);
}

function nodesSection() {
  const note = h("p", { class: "note" });
  function draw(width) {
    const all = nodeRatios();
    const nodes = all.slice(0, MOST_NODES);
    note.textContent =
      "Step time of each run relative to the median of equal points; right is slower. " +
      "A run on several nodes counts for each: it is as slow as its slowest node. " +
      (all.length > nodes.length ? `The slowest ${nodes.length} of ${count(all.length)} nodes.` : "");
    if (!nodes.length) return null;
    const names = nodes.map((entry) => entry.node);
    const room = labelRoom(names, width);
    const ratios = nodes.flatMap((entry) => entry.list);
    const tip = (entry) =>
      `${shorten(entry.node, 60)}\nmedian ${formatChange(entry.median)}\n${plural(entry.list.length, "run")}`;
    return plot(width, {
      height: 66 + 24 * nodes.length,
      marginLeft: room.margin,
      x: {
        label: "step time relative to equal points →",
        tickFormat: (value) => formatShare(value, 1),
        grid: true,
        nice: true,
        ticks: Math.max(2, width / 120),
      },
      y: { label: null, domain: names, tickFormat: (name) => shorten(name, room.characters), tickSize: 0 },
      marks: [
        Plot.ruleX([0], { stroke: "var(--control)" }),
        Plot.dot(ratios, { x: "ratio", y: "node", r: 3, fill: "var(--data)", fillOpacity: 0.6 }),
        Plot.tickX(nodes, {
          x: "median",
          y: "node",
          stroke: "var(--derived)",
          strokeWidth: 3,
          insetTop: 3,
          insetBottom: 3,
        }),
        hover(nodes, Plot.pointerY({ x: "median", y: "node", title: tip })),
      ],
    });
  }
  const chart = figure({
    title: "",
    draw,
    label: () =>
      `Relative step time by node, for ${plural(nodeRatios().length, "node")}; the numbers follow as a table.`,
    empty: "No equal points ran on different nodes: nodes cannot be compared.",
    numbers: () => ({
      head: ["node", "runs", "median", "lowest", "highest"],
      rows: nodeRatios().map((entry) => [
        entry.node,
        entry.list.length,
        formatChange(entry.median),
        formatChange(d3.min(entry.list, (r) => r.ratio)),
        formatChange(d3.max(entry.list, (r) => r.ratio)),
      ]),
      numbers: [1, 2, 3, 4],
    }),
  });
  return {
    element: section("nodes", "Nodes compared", note, chart.element),
    onFilter: [chart.redraw],
    onSelection: [],
  };
}
