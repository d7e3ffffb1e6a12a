// Positions of a tree's nodes in its picture: left to right by depth, one row per trajectory. Pure functions.

const ROW = 44;
const GAP = 28;
const LEAST = 38;
const MOST = 150;
export const NODE_HEIGHT = 28;

function childrenOf(nodes) {
  const children = nodes.map(() => []);
  nodes.forEach((node, index) => node.parent !== null && children[node.parent].push(index));
  return children;
}

// Indices of the nodes from the root to a node, both included.
export function prefixOf(nodes, index) {
  const indices = [];
  for (let at = index; at !== null && at !== undefined; at = nodes[at].parent) indices.push(at);
  return indices.reverse();
}

export function layoutTree(tree) {
  const { nodes, leaves } = tree;
  const children = childrenOf(nodes);
  const leavesAt = nodes.map(() => []);
  leaves.forEach((leaf, number) => leavesAt[leaf.node]?.push(number));
  const depth = nodes.map(() => 0);
  nodes.forEach((node, index) => node.parent !== null && (depth[index] = depth[node.parent] + 1));
  const rows = assignRows(children, leavesAt);
  const width = widths(nodes);
  const columns = [];
  depth.forEach((place, index) => (columns[place] = Math.max(columns[place] ?? 0, width[index])));
  const starts = [16];
  columns.forEach((size, place) => (starts[place + 1] = starts[place] + size + GAP));
  const places = nodes.map((node, index) => ({
    index,
    parent: node.parent,
    depth: depth[index],
    x: starts[depth[index]],
    y: 26 + rows.of[index] * ROW,
    width: width[index],
    children: children[index],
    leaves: leavesAt[index],
  }));
  const end = starts[columns.length] + 4;
  const leafPlaces = leaves.map((leaf, number) => ({ number, node: leaf.node, x: end, y: 26 + rows.leaf[number] * ROW }));
  return { places, leafPlaces, width: end + 172, height: 26 + rows.count * ROW };
}

// One row per leaf and per childless node; a parent is centered on its children and leaves.
function assignRows(children, leavesAt) {
  const of = children.map(() => 0);
  const leaf = [];
  let count = 0;
  const stack = [0];
  const own = children.map(() => []);
  while (stack.length) {
    const index = stack.pop();
    for (const number of leavesAt[index]) {
      leaf[number] = count;
      own[index].push(count);
      count += 1;
    }
    if (!children[index].length && !leavesAt[index].length) {
      own[index].push(count);
      count += 1;
    }
    stack.push(...children[index].toReversed());
  }
  for (let index = children.length - 1; index >= 0; index -= 1) {
    const rows = [...own[index], ...children[index].map((child) => of[child])];
    of[index] = (Math.min(...rows) + Math.max(...rows)) / 2;
  }
  return { of, leaf, count };
}

function widths(nodes) {
  return nodes.map((node) => {
    const size = LEAST + 5 * Math.sqrt(node.tokens?.length ?? 0);
    const label = node.kind === "tool" ? 30 + 7 * Math.min(10, node.call?.name.length ?? 0) : 0;
    return Math.min(MOST, Math.round(Math.max(size, label)));
  });
}

// The item that an arrow key moves to: "n3" is node 3, "l1" is leaf 1.
export function neighbor(layout, item, key) {
  const number = Number(item.slice(1));
  if (key === "Home") return "n0";
  if (item[0] === "l") {
    if (key === "ArrowLeft") return `n${layout.leafPlaces[number].node}`;
    return inColumn(layout.leafPlaces.map((end) => [`l${end.number}`, end.y]), item, key);
  }
  const place = layout.places[number];
  if (key === "ArrowLeft") return place.parent === null ? item : `n${place.parent}`;
  if (key === "ArrowRight") {
    if (place.children.length) return `n${place.children[0]}`;
    return place.leaves.length ? `l${place.leaves[0]}` : item;
  }
  const column = layout.places.filter((other) => other.depth === place.depth);
  return inColumn(column.map((other) => [`n${other.index}`, other.y]), item, key);
}

function inColumn(column, item, key) {
  const order = column.toSorted(([, a], [, b]) => a - b).map(([name]) => name);
  const step = { ArrowUp: -1, ArrowDown: 1 }[key] ?? 0;
  return order[order.indexOf(item) + step] ?? item;
}
