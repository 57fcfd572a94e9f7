// The answer: what was fastest and what it cost, why runs did not succeed, what was rejected. As the terminal says it.

const ENDING = DATA.ending;
const CAUSES_AT_ONCE = 3;

function fastest() {
  const gate = DATA.gate;
  const judged = gate?.headline
    ? h("p", { class: "fastest" }, "Gate: ", verdictMark(gate.verdict), ": ", data(gate.headline))
    : null;
  return [judged, ...findings()].filter(Boolean);
}

function findings() {
  return ENDING.fastest.map((text) => h("p", { class: "fastest" }, data(text)));
}

function answer() {
  const facts = [ENDING.measured, ENDING.cost].filter(Boolean).join("; ");
  return h(
    "div",
    { id: "answer" },
    facts ? h("p", { class: "note" }, data(facts)) : null,
    ENDING.causes.length ? gradually(ENDING.causes, causeItem, CAUSES_AT_ONCE, "causes", "ul") : null,
    ENDING.rejected ? h("p", {}, verdictMark("rejected"), ": ", data(ENDING.rejected)) : null,
  );
}

function causeItem(cause) {
  const excerpt = cause.excerpt.length ? h("pre", {}, cause.excerpt.join("\n")) : null;
  return h("li", {}, verdictMark(cause.verdict), ": ", data(cause.text), excerpt);
}
