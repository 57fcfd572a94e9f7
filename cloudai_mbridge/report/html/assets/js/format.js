// Numbers and words as people read them. Missing is a dash with its reason, never a number.

const NOT_FINITE = { nan: NaN, inf: Infinity, "-inf": -Infinity };
const DASH = "–";
const WHOLE = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const NATURAL = new Intl.Collator("en", { numeric: true });

function count(value) {
  return WHOLE.format(value);
}

function plural(number, word) {
  return `${count(number)} ${word}${number === 1 ? "" : "s"}`;
}

// The contract writes numbers that are not finite as words.
function toNumber(value) {
  if (typeof value === "number") return value;
  return NOT_FINITE[value] ?? null;
}

function isFinal(value) {
  return typeof value === "number" && Number.isFinite(value);
}

function formatNumber(value, digits = 4) {
  if (value === null || value === undefined) return DASH;
  if (Number.isNaN(value)) return "NaN";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-4 || size >= 1e9)) return value.toExponential(digits - 1).replace("-", "−");
  const whole = size >= 1 ? Math.trunc(Math.log10(size)) + 1 : 0;
  return significant(Math.max(digits, whole)).format(value).replace("-", "−");
}

// Formatters are costly to make.
const formatters = new Map();

function significant(digits) {
  if (!formatters.has(digits))
    formatters.set(digits, new Intl.NumberFormat("en", { maximumSignificantDigits: digits }));
  return formatters.get(digits);
}

function formatShare(value, digits = 1) {
  if (!isFinal(value)) return DASH;
  return `${(100 * value).toFixed(digits).replace("-", "−")} %`;
}

function formatChange(value) {
  if (!isFinal(value)) return DASH;
  return `${value > 0 ? "+" : ""}${formatShare(value, 2)}`;
}

function formatTime(text) {
  const time = new Date(text ?? "");
  if (Number.isNaN(time.getTime())) return String(text || DASH);
  return `${time.toISOString().slice(0, 16).replace("T", " ")} UTC`;
}

// Cut out of the middle: both ends of a path or of a label tell runs apart.
function shorten(text, length) {
  const characters = Array.from(text);
  if (characters.length <= length) return text;
  const tail = Math.floor((length - 1) / 2);
  return `${characters.slice(0, length - 1 - tail).join("")}…${characters.slice(characters.length - tail).join("")}`;
}

function numberCell(value, why, spread) {
  if (value === null || value === undefined) {
    return h("span", { class: "missing", title: why }, DASH, h("span", { class: "hidden" }, ` missing: ${why}`));
  }
  if (!Number.isFinite(value))
    return h("span", { class: "verdict failed", title: "not a finite number" }, formatNumber(value));
  const [number, error] = withError(value, spread);
  return h("span", {}, number, error === null ? null : h("span", { class: "spread" }, ` ±${error}`));
}

// An error has two digits, and its value ends at the same place, as in the terminal's tables.
function withError(value, error) {
  if (!isFinal(error)) return [formatNumber(value), null];
  const place = error > 0 ? Math.floor(Math.log10(Number(error.toExponential(1)))) - 1 : -Infinity;
  if (place < -6 || Math.max(Math.abs(value), error) >= 1e9) return [formatNumber(value), formatNumber(error, 2)];
  const unit = 10 ** Math.max(0, place);
  const digits = Math.max(0, -place);
  const format = new Intl.NumberFormat("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
  const rounded = (number) => format.format(unit === 1 ? number : Math.round(number / unit) * unit);
  return [value, error].map((number) => rounded(number).replace("-", "−"));
}

const GLYPHS = {
  success: "✓",
  pass: "✓",
  improvement: "✓",
  failed: "✗",
  regression: "✗",
  skipped: "↷",
  cancelled: "⊗",
  rejected: "⊘",
  inconclusive: "?",
  unfinished: "…",
};

function verdictMark(verdict) {
  const glyph = GLYPHS[verdict] ?? "!";
  return h(
    "span",
    { class: `verdict ${verdict.split(" ")[0]}` },
    h("span", { "aria-hidden": "true" }, `${glyph} `),
    verdict,
  );
}

// Numbers by size, then words by their order, then what is not a number, last what is missing; the last two stay last.
function compareCells(a, b, direction) {
  const rank = (value) => {
    if (value === null || value === undefined || value === "") return 3;
    return typeof value === "number" ? (Number.isNaN(value) ? 2 : 0) : 1;
  };
  const [rankA, rankB] = [rank(a), rank(b)];
  if (rankA !== rankB) return rankA > 1 || rankB > 1 ? rankA - rankB : direction * (rankA - rankB);
  if (rankA === 0) return direction * (a === b ? 0 : a < b ? -1 : 1);
  return rankA === 1 ? direction * NATURAL.compare(a, b) : 0;
}
