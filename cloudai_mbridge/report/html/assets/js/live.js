// The page of an active run: it reloads itself, except while it is paused or in use.

const IN_USE_MS = 30_000;

function showLive() {
  if (!DATA.reload_s) return;
  const text = h("span", {});
  const button = h("button", { type: "button", id: "pause", class: "no-print" });
  let paused = false;
  let usedAt = -IN_USE_MS;
  const show = () => {
    text.textContent = paused
      ? "Results so far; updates are paused. "
      : `Results so far; the page loads itself again every ${DATA.reload_s} s. `;
    button.textContent = paused ? "Continue" : "Pause";
  };
  button.addEventListener("click", () => ((paused = !paused), show()));
  const use = (event) => event.target !== button && (usedAt = performance.now());
  for (const kind of ["pointerdown", "keydown", "wheel"]) addEventListener(kind, use, { passive: true });
  setInterval(() => {
    const now = performance.now();
    if (paused || now < DATA.reload_s * 1000 || now - usedAt < IN_USE_MS) return;
    remember();
    location.reload();
  }, 1000);
  show();
  document.getElementById("headline").append(h("p", { id: "live" }, text, button));
}

// The history entry of a page survives that it is loaded again.
function remember() {
  const { theme } = document.documentElement.dataset;
  window.history.replaceState({ theme, filter: document.getElementById("text-filter").value }, "");
}

function recall() {
  if (!DATA.reload_s || !window.history.state) return;
  const { theme, filter } = window.history.state;
  if (THEMES.includes(theme)) setTheme(theme);
  const text = document.getElementById("text-filter");
  if (!filter || !text) return;
  text.value = filter;
  text.dispatchEvent(new Event("input"));
}
