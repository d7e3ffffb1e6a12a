// Line charts: several series over one x, a readout by pointer or arrow keys, redrawn in place.
// A series: {name, points: [[x, y or null], ...], color: 0..7, mark: 0..7, dash: 0..3, faint, band: [[x, low, high], ...]}.
// If all series have a `weight` and a `high`, the y axis ends at `robustTop`; what lies beyond is marked at its edge.

import { clear, el, number, svg } from "./dom.js";
import { robustTop } from "./scale.js";

const HEIGHT = 190;
const EDGE = { left: 52, right: 14, top: 8, bottom: 30 };
const DASHES = ["", "6 3", "2 3", "9 3 2 3"];
const COLORS = 8;
const MARKS = 25; // of a series

export function makeChart({ title, format = number, xFormat = number, xLabel = "step", floor = null, ceiling = null }) {
  const readout = el("output", { class: "readout" });
  const legend = el("div", { class: "legend" });
  const frame = svg("svg", { role: "img", tabindex: "0", height: HEIGHT, class: "plot" });
  const node = el("figure", { class: "chart" }, el("figcaption", {}, title), legend, frame, readout);
  const shown = { series: [], xLabel, xFormat, cursor: null, scale: null };

  function update(series, more = {}) {
    Object.assign(shown, more, { series });
    draw();
  }

  function draw() {
    const width = Math.max(240, node.clientWidth - 18 || 360);
    const drawn = shown.series.filter((one) => one.points.some(([, y]) => y !== null));
    frame.setAttribute("width", width);
    frame.setAttribute("aria-label", describe(title, drawn, format));
    shown.scale = scales(drawn, width, floor, ceiling);
    const parts = drawn.length ? axes(shown.scale, width, shown, format) : [nothing(width)];
    for (const one of drawn) parts.push(...line(one, shown.scale));
    const cursor = svg("g", { class: "cursor" });
    frame.replaceChildren(...parts, cursor);
    drawLegend(legend, drawn, shown.scale, format);
    point(shown.cursor);
  }

  function point(x) {
    shown.cursor = x;
    const cursor = clear(frame.querySelector(".cursor"));
    if (x === null || !shown.series.length) {
      readout.textContent = "";
      return;
    }
    const { px, py } = shown.scale;
    const near = shown.series.filter((one) => !one.faint && one.points.length).map((one) => [one, nearest(one.points, x)]);
    const at = near.length ? nearest(near.map(([, found]) => found), x)[0] : x;
    cursor.append(svg("line", { x1: px(at), x2: px(at), y1: EDGE.top, y2: HEIGHT - EDGE.bottom }));
    for (const [one, [a, b]] of near) {
      if (b !== null) cursor.append(svg("circle", { cx: px(a), cy: py(b), r: 3.5, class: `c${one.color % COLORS}` }));
    }
    const values = near.map(([one, [, y]]) => `${near.length > 1 ? `${one.name} ` : ""}${format(y)}`);
    readout.textContent = `${shown.xLabel} ${shown.xFormat(at)}: ${values.join(", ")}`;
  }

  frame.addEventListener("pointermove", (event) => {
    if (shown.scale) point(shown.scale.back(event.clientX - frame.getBoundingClientRect().left));
  });
  frame.addEventListener("pointerleave", () => document.activeElement !== frame && point(null));
  frame.addEventListener("blur", () => point(null));
  frame.addEventListener("keydown", (event) => {
    const places = [...new Set(shown.series.flatMap((one) => one.points.map(([x]) => x)))].sort((a, b) => a - b);
    const next = stepTo(places, shown.cursor, event.key);
    if (next === undefined) return;
    event.preventDefault();
    point(next);
  });
  new ResizeObserver(() => frame.isConnected && draw()).observe(node);
  return { node, update };
}

function stepTo(places, at, key) {
  if (!places.length) return undefined;
  if (key === "Home") return places[0];
  if (key === "End") return places.at(-1);
  if (key === "ArrowRight") return places.find((x) => at === null || x > at) ?? places.at(-1);
  if (key === "ArrowLeft") return places.findLast((x) => at === null || x < at) ?? places[0];
  return undefined;
}

function nearest(points, x) {
  let low = 0;
  let high = points.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (points[middle][0] < x) low = middle;
    else high = middle;
  }
  return Math.abs(points[low][0] - x) <= Math.abs(points[high][0] - x) ? points[low] : points[high];
}

function scales(series, width, floor, ceiling) {
  const xs = extent(series.flatMap((one) => one.points.map(([x]) => x)));
  let [low, high] = extent(series.flatMap((one) => one.points.map(([, y]) => y)).filter((y) => y !== null));
  if (series.length && series.every((one) => one.weight > 0)) high = robustTop(series);
  if (series.some((one) => one.band?.length)) high += 0.2 * (high - low); // bands may be far wider than their curve
  if (floor !== null) low = Math.min(low, floor);
  if (ceiling !== null) high = Math.max(high, ceiling);
  if (high - low <= 1e-9 * Math.max(Math.abs(low), Math.abs(high))) [low, high] = [low - (Math.abs(low) || 1) / 2, high + (Math.abs(high) || 1) / 2];
  if (!(xs[1] > xs[0])) xs[1] = xs[0] + 1;
  const inner = width - EDGE.left - EDGE.right;
  const tall = HEIGHT - EDGE.top - EDGE.bottom;
  return {
    xs,
    ys: [low, high],
    px: (x) => EDGE.left + ((x - xs[0]) / (xs[1] - xs[0])) * inner,
    py: (y) => EDGE.top + ((high - Math.min(y, high)) / (high - low)) * tall,
    back: (pixel) => xs[0] + ((pixel - EDGE.left) / inner) * (xs[1] - xs[0]),
  };
}

function extent(values) {
  let low = Infinity;
  let high = -Infinity;
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return low <= high ? [low, high] : [0, 1];
}

function ticks([low, high], wanted, least = 0) {
  const raw = Math.max(least, (high - low) / wanted);
  if (!(raw > 1e-12 * Math.max(Math.abs(low), Math.abs(high)))) return [low];
  const unit = 10 ** Math.floor(Math.log10(raw));
  const factors = least ? [1, 2, 5, 10] : [1, 2, 2.5, 5, 10];
  const step = factors.map((factor) => factor * unit).find((size) => size >= raw * 0.999);
  const first = Math.ceil(low / step - 1e-9);
  const found = [];
  for (let place = first; place * step <= high + step * 1e-9; place += 1) found.push(place * step);
  return found;
}

function axes(scale, width, shown, format) {
  const bottom = HEIGHT - EDGE.bottom;
  const parts = [];
  for (const y of ticks(scale.ys, 4)) {
    parts.push(svg("line", { class: "grid", x1: EDGE.left, x2: width - EDGE.right, y1: scale.py(y), y2: scale.py(y) }));
    parts.push(svg("text", { class: "tick", x: EDGE.left - 6, y: scale.py(y) + 4, "text-anchor": "end" }, format(y)));
  }
  for (const x of ticks(scale.xs, Math.max(2, width / 75), shown.wholeX ? 1 : 0)) {
    parts.push(svg("line", { class: "grid", x1: scale.px(x), x2: scale.px(x), y1: bottom, y2: bottom + 4 }));
    const label = svg("text", { class: "tick", x: scale.px(x), y: bottom + 15, "text-anchor": "middle" });
    label.append(shown.xFormat(x));
    parts.push(label);
  }
  parts.push(svg("line", { class: "axis", x1: EDGE.left, x2: width - EDGE.right, y1: bottom, y2: bottom }));
  const name = { class: "tick", x: width - EDGE.right, y: HEIGHT - 3, "text-anchor": "end" };
  return [...parts, svg("text", name, shown.xLabel)];
}

function nothing(width) {
  return svg("text", { class: "tick", x: width / 2, y: HEIGHT / 2, "text-anchor": "middle" }, "nothing recorded");
}

function line(one, scale) {
  const color = `c${one.color % COLORS}`;
  const parts = [];
  if (one.band?.length) {
    const inside = (y) => scale.py(Math.max(scale.ys[0], Math.min(scale.ys[1], y))).toFixed(1);
    const there = one.band.map(([x, , high]) => `${scale.px(x).toFixed(1)},${inside(high)}`);
    const back = one.band.map(([x, low]) => `${scale.px(x).toFixed(1)},${inside(low)}`).reverse();
    parts.push(svg("polygon", { class: `band ${color}`, points: [...there, ...back].join(" ") }));
  }
  let path = "";
  let pen = "M";
  for (const [x, y] of one.points) {
    if (y === null) {
      pen = "M";
      continue;
    }
    path += `${pen}${scale.px(x).toFixed(1)} ${scale.py(y).toFixed(1)}`;
    pen = "L";
  }
  const known = one.points.filter(([, y]) => y !== null);
  const beyond = beyondAxis(one, scale);
  const spread = Math.ceil(beyond.length / MARKS);
  for (const [x] of beyond.filter((_, place) => place % spread === 0)) {
    parts.push(svg("path", { class: `mark beyond ${color}`, d: "M0 -6L4.5 1H-4.5Z", transform: `translate(${scale.px(x).toFixed(1)} ${EDGE.top})` }));
  }
  const look = { class: `line ${color}${one.faint ? " faint" : ""}`, d: path, "stroke-dasharray": DASHES[one.dash ?? 0] };
  parts.push(svg("path", look));
  if (!one.faint) {
    const every = Math.ceil(known.length / MARKS);
    const marked = known.filter((_, place) => (known.length - 1 - place) % every === 0);
    for (const [x, y] of one.dots || known.length < 3 ? marked : known.slice(-1)) parts.push(symbol(one.mark ?? 0, scale.px(x), scale.py(y), color));
  }
  return parts;
}

function beyondAxis(one, scale) {
  return one.points.filter(([, y]) => y !== null && y > scale.ys[1]);
}

const SHAPES = [
  "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0Z",
  "M-3.5 -3.5h7v7h-7Z",
  "M0 -4.5L4.5 3.5H-4.5Z",
  "M0 -5L5 0L0 5L-5 0Z",
  "M0 4.5L4.5 -3.5H-4.5Z",
  "M-1.5 -4.5h3v3h3v3h-3v3h-3v-3h-3v-3h3Z",
  "M-4.5 -3L-3 -4.5L0 -1.5L3 -4.5L4.5 -3L1.5 0L4.5 3L3 4.5L0 1.5L-3 4.5L-4.5 3L-1.5 0Z",
  "M0 -5L1.5 -1.5L5 0L1.5 1.5L0 5L-1.5 1.5L-5 0L-1.5 -1.5Z",
];

function symbol(shape, x, y, color) {
  const place = `translate(${x.toFixed(1)} ${y.toFixed(1)})`;
  return svg("path", { class: `mark ${color}`, d: SHAPES[shape % SHAPES.length], transform: place });
}

// The mark of a run or an algorithm as a small picture in a list.
export function badge(place) {
  const color = `c${place % COLORS}`;
  return svg("svg", { class: "badge", width: 14, height: 14, "aria-hidden": "true" }, symbol(place, 7, 7, color));
}

function drawLegend(legend, series, scale, format) {
  const named = new Map(series.filter((one) => one.legend).map((one) => [one.legend, one]));
  const several = new Set(series.map((one) => one.color)).size > 1 && named.size < series.length;
  const lines = [...named.values()].map((one) => {
    const stroke = { class: `line ${several && !one.own ? "" : `c${one.color % COLORS}`}`, d: "M0 6H22", "stroke-dasharray": DASHES[one.dash ?? 0] };
    const picture = svg("svg", { width: 22, height: 12, "aria-hidden": "true" }, svg("path", stroke));
    const beyond = beyondAxis(one, scale);
    const said = beyond.length ? ` (▲ beyond the axis, up to ${format(extent(beyond.map(([, y]) => y))[1])})` : "";
    return el("span", {}, picture, ` ${one.legend}${said}`);
  });
  legend.replaceChildren(...lines);
}

function describe(title, series, format) {
  if (!series.length) return `${title}: nothing recorded`;
  const ends = series
    .filter((one) => !one.faint)
    .map((one) => {
      const known = one.points.filter(([, y]) => y !== null);
      return `${one.name} from ${format(known[0][1])} to ${format(known.at(-1)[1])}`;
    });
  return `${title}: ${ends.join("; ")}. Arrow keys read single points.`;
}
