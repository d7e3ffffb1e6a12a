// The images of prompts and results: small ones, the full size on click, and where a crop was taken from.

import { el, number, printable, shorten, svg } from "./dom.js";
import { prefixOf } from "./layout.js";
import { imageUrl } from "./source.js";

const THUMB = 220; // pixels of the longer side
const LINE = 3; // of a rectangle, in pixels of the screen

// The images of a node as figures. `origin` has the id of the run (`run`) or the evaluation (`eval`), how boxes are
// written there (fraction, thousandth, pixel), and the addresses of images that are not stored there, if any (`pictures`).
export function imageFigures(tree, index, origin) {
  const node = tree.nodes[index];
  const before = seenBefore(tree, index);
  const shown = own(tree, node).map((image, place) => figure(image, `image ${before.length + place + 1}${made(node)}`, origin));
  const crop = cropOf(node, before, origin.coordinates);
  if (crop) shown.unshift(figure(before[crop.from - 1], `where image ${crop.from} was cropped`, origin, crop.box));
  return shown.length ? [el("div", { class: "images" }, ...shown)] : [];
}

function own(tree, node) {
  const found = node.kind === "prompt" ? (tree.task.images ?? node.images) : node.kind === "tool" ? (node.result?.images ?? node.images) : null;
  return Array.isArray(found) ? found.filter(usable) : [];
}

function usable(image) {
  return /^[0-9a-f]{64}$/.test(image?.sha256) && [image.width, image.height].every((side) => Number.isInteger(side) && side > 0);
}

// The images that a trajectory has seen before a node, in the order in which calls number them, from 1 on.
function seenBefore(tree, index) {
  return prefixOf(tree.nodes, index).filter((other) => other !== index).flatMap((other) => own(tree, tree.nodes[other]));
}

function made(node) {
  const { name, args } = node.call ?? {};
  const from = Number.isInteger(args?.image) ? args.image : 1;
  if (name === "rotate" && typeof args?.degrees === "number") return `: image ${from} turned by ${number(args.degrees)}°`;
  if (name === "crop") return `: cropped from image ${from}`;
  return "";
}

// The box of a call in pixels of the image that it names, cut off at its edges; null if there is none.
function cropOf(node, before, coordinates) {
  const args = node.call?.args ?? {};
  const box = Array.isArray(args.box) ? args.box : [args.x0, args.y0, args.x1, args.y1];
  const from = Number.isInteger(args.image) ? args.image : 1;
  const image = before[from - 1];
  if (!image || box.length !== 4 || !box.every((side) => typeof side === "number" && Number.isFinite(side))) return null;
  const written = coordinates ?? (box.every((side) => Math.abs(side) <= 1) ? "fraction" : "pixel");
  const limit = { fraction: [1, 1], thousandth: [1000, 1000] }[written] ?? [image.width, image.height];
  const at = (side, axis, size) => Math.min(size, Math.max(0, (side / limit[axis]) * size));
  const [x0, x1] = [at(box[0], 0, image.width), at(box[2], 0, image.width)];
  const [y0, y1] = [at(box[1], 1, image.height), at(box[3], 1, image.height)];
  return x0 < x1 && y0 < y1 ? { from, box: { x: x0, y: y0, width: x1 - x0, height: y1 - y0 } } : null;
}

function figure(image, name, origin, box = null) {
  const url = origin.pictures?.[image.sha256] ?? imageUrl(origin, image.sha256);
  const size = `${number(image.width)} × ${number(image.height)}`;
  const caption = el("figcaption", {}, `${name} · ${size}`);
  if (url === null) return el("figure", { class: "missing" }, el("p", {}, "not in this page"), caption);
  const label = `${name}, ${image.width} by ${image.height} pixels`;
  const scale = Math.min(1, THUMB / Math.max(image.width, image.height));
  const small = picture(url, image, label, scale, box);
  const open = el("button", { type: "button", class: "thumb", "aria-label": `Full size: ${label}`, click: () => showFull(url, image, label, box) }, small);
  const made = el("figure", {}, open, caption);
  (small.matches("img") ? small : small.querySelector("image")).addEventListener("error", () => {
    made.classList.add("missing");
    open.replaceWith(el("p", {}, "not stored with this run"));
  });
  return made;
}

// The image, or with a box a drawing of both. Sizes are attributes: the page allows no inline styles.
function picture(url, image, label, scale, box) {
  const [width, height] = [Math.max(1, Math.round(image.width * scale)), Math.max(1, Math.round(image.height * scale))];
  if (!box) return el("img", { src: url, alt: label, width, height, loading: "lazy", decoding: "async" });
  const line = LINE / scale;
  return svg(
    "svg",
    { role: "img", "aria-label": label, width, height, viewBox: `0 0 ${image.width} ${image.height}` },
    svg("image", { href: url, width: image.width, height: image.height }),
    svg("rect", { class: "halo", ...box, "stroke-width": 2 * line }),
    svg("rect", { class: "crop", ...box, "stroke-width": line }),
  );
}

function showFull(url, image, label, box) {
  const close = () => dialog.close();
  const dialog = el(
    "dialog",
    { class: "full", "aria-label": label, close: () => dialog.remove() },
    el("div", { class: "bar" }, el("span", {}, printable(shorten(label, 200))), el("button", { type: "button", click: close }, "Close")),
    el("div", { class: "scroll" }, picture(url, image, label, 1, box)),
  );
  document.body.append(dialog);
  dialog.showModal();
}
