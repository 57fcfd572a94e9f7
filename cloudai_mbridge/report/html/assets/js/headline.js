// What this is, how much of it succeeded, the answer, when and by what; the sections; the switch between light and dark.

const THEMES = ["auto", "light", "dark"];

function themeButton() {
  const button = h("button", { type: "button", id: "theme", class: "no-print" });
  button.addEventListener("click", () => {
    setTheme(THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length]);
  });
  return button;
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  document.getElementById("theme").textContent = `Theme: ${theme}`;
}

function fact(name, value) {
  return value ? h("div", {}, h("dt", {}, name), h("dd", {}, value instanceof Node ? value : data(value))) : null;
}

function distinct(values) {
  return [...new Set(values.filter((value) => value !== null && value !== undefined && value !== ""))];
}

function showHeadline() {
  const tile = (verdict) => h("li", {}, h("b", {}, count(HEAD.summary?.[verdict] ?? 0)), verdictMark(verdict));
  document.title = `${HEAD.scenario} on ${HEAD.system}: benchmark report`;
  document
    .getElementById("headline")
    .append(
      h(
        "div",
        { class: "top" },
        h("h1", {}, data(HEAD.scenario), h("span", { class: "system" }, " on ", data(HEAD.system))),
        themeButton(),
      ),
      ...fastest(),
      h("ul", { class: "tiles", "aria-label": "Points by verdict" }, VERDICTS.map(tile)),
      answer(),
      h(
        "dl",
        { class: "facts" },
        fact("reported", formatTime(HEAD.created_at)),
        fact("by", `${HEAD.tool?.name ?? "mbridge"} ${HEAD.tool?.version ?? ""}`),
        fact("FLOPs formula", distinct(RUNS.map((run) => run.flops_formula)).join(", ") || "not told"),
        fact("memory", distinct(RUNS.map((run) => run.memory_kind)).join(", ") || "not measured"),
      ),
      ...(HEAD.notes ?? []).map((note) => h("p", { class: "note" }, data(note))),
    );
  setTheme("auto");
}

function showContents(sections) {
  const link = (element) => h("li", {}, h("a", { href: `#${element.id}` }, element.querySelector("h2").textContent));
  document.getElementById("contents").append(h("ul", {}, sections.map(link)));
}

function showFooter() {
  const licences = JSON.parse(document.getElementById("licences").textContent);
  document
    .getElementById("footer")
    .append(
      h("p", {}, "Drawn with D3 and Observable Plot, which are inside this file. Nothing was or will be fetched."),
      h("details", {}, h("summary", {}, "Their licences"), h("pre", {}, licences)),
    );
}
