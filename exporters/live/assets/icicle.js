// Where the boxes of an icicle stand: a node's children below it, the widest first, within its own width.
const NARROWEST = 2;

/** What widths stand for, each with all below it: tokens that requests brought through, or tokens cached with copies. */
export const MEASURES = {
  flow: (node) => node.flow_tokens_below ?? 0,
  cached: (node) => node.copied_tokens_below,
};

/**
 * Boxes {node, x, row, width, leftOut} and rests {x, row, width, nodes}: siblings too narrow to be boxes, in one.
 * `leftOut`: it has children, none of which is drawn. Boxes come row by row, from left to right.
 */
export function layOut(nodes, top, across, width) {
  const children = new Map();
  for (const node of nodes) {
    const parent = node.id === top ? "" : node.parent ?? "";
    if (!children.has(parent)) children.set(parent, []);
    children.get(parent).push(node);
  }
  for (const siblings of children.values()) siblings.sort((a, b) => width(b) - width(a));
  const roots = children.get("") ?? [];
  const scale = across / Math.max(roots.reduce((sum, node) => sum + width(node), 0), 1);
  const boxes = [];
  const rests = [];
  let row = [{x: 0, nodes: roots, depth: 0}];
  let rows = 0;
  while (row.length) {
    const next = [];
    for (const {x, nodes: siblings, depth} of row) {
      let left = x;
      let narrow = 0;
      for (const [k, node] of siblings.entries()) {
        const own = width(node) * scale;
        if (own < NARROWEST) {
          narrow = siblings.length - k;
          const rest = siblings.slice(k).reduce((sum, one) => sum + width(one), 0) * scale;
          if (rest >= 1) rests.push({x: left, row: depth, width: rest, nodes: narrow});
          break;
        }
        const box = {node, x: left, row: depth, width: own, leftOut: node.children > 0};
        boxes.push(box);
        rows = Math.max(rows, depth + 1);
        const below = children.get(node.id);
        if (below) {
          box.leftOut = width(below[0]) * scale < NARROWEST;
          next.push({x: left, nodes: below, depth: depth + 1});
        }
        left += own;
      }
    }
    row = next;
  }
  return {boxes, rests, rows: Math.max(rows, 1, ...rests.map((rest) => rest.row + 1))};
}
