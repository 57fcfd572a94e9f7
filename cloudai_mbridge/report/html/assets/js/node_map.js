// A map of nodes, as `mbridge nodes show` judged them: a cell each, in the order of their names.

const NODE_GLYPHS = { slow: "▲", normal: "✓", "too few runs": "?" };
const MOST_MAPPED = 4096;

function nodeMapSection() {
  const judged = DATA.nodes;
  if (!judged) return null;
  const counts = d3.rollup(
    judged.nodes,
    (group) => group.length,
    (node) => node.verdict,
  );
  const summary = Object.keys(NODE_GLYPHS)
    .filter((verdict) => counts.has(verdict))
    .map((verdict) => `${NODE_GLYPHS[verdict]} ${count(counts.get(verdict))} ${verdict}`)
    .join(", ");
  const sorted = [...judged.nodes].sort((a, b) => NATURAL.compare(a.node, b.node));
  const cells = sorted.slice(0, MOST_MAPPED);
  const head = ["node", "effect", "95 % interval", "runs", "verdict"];
  const rows = judged.nodes
    .slice(0, 500)
    .map((node) => [node.node, effectText(node), intervalText(node), count(node.runs), nodeMark(node.verdict)]);
  return section(
    "node-map",
    "Map of nodes",
    h("p", {}, `${plural(judged.nodes.length, "node")}: ${summary || "none"}; from ${plural(judged.runs, "run")}.`),
    h(
      "p",
      { class: "note" },
      `Effects are on the step time. A node is slow if that is significant over all nodes, with a false-alarm rate of at ` +
        `most ${formatShare(toNumber(judged.false_alarm_rate), 1)}, and normal if ${formatShare(judged.slowdown, 0)} or more is ruled out.`,
    ),
    h("ul", { class: "node-map", "aria-label": "Nodes by name" }, cells.map(nodeCell)),
    sorted.length > cells.length ? h("p", { class: "note" }, `The first ${count(cells.length)} by name.`) : null,
    (judged.odd ?? []).map((odd) =>
      h("p", { class: "note" }, data(`${odd.node}: ${odd.fact} is ${odd.value}; ${odd.others} others have ${odd.usual}`)),
    ),
    (judged.notes ?? []).map((note) => h("p", { class: "note" }, data(note))),
    h("details", {}, h("summary", {}, "Numbers"), region("Nodes, may scroll", simpleTable(head, rows, { numbers: [1, 2, 3] }))),
  );
}

function nodeCell(node) {
  const kind = node.verdict.split(" ")[0];
  const tip = `${node.node}: ${node.verdict}, ${effectText(node)} (${intervalText(node)}), ${plural(node.runs, "run")}`;
  return h(
    "li",
    { class: `node ${kind}`, title: tip },
    h("span", { "aria-hidden": "true" }, `${NODE_GLYPHS[node.verdict]} `),
    shortData(node.node, 16),
    h("span", { class: "hidden" }, ` ${node.verdict}`),
    node.effect === null ? null : h("span", { class: "effect" }, ` ${formatChange(toNumber(node.effect))}`),
  );
}

function nodeMark(verdict) {
  return h("span", { class: `node-verdict ${verdict.split(" ")[0]}` }, `${NODE_GLYPHS[verdict]} ${verdict}`);
}

function effectText(node) {
  return formatChange(toNumber(node.effect));
}

function intervalText(node) {
  return node.interval ? node.interval.map((bound) => formatChange(toNumber(bound))).join(" … ") : DASH;
}
