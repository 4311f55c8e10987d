// Renderer of Markdown in answers, which builds nodes and never parses HTML.

export function element(tag, properties = {}, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
}

export function copyButton(text, label) {
  const button = element("button", { type: "button", className: "small", textContent: "Copy", ariaLabel: label });
  button.addEventListener("click", async () => {
    const copied = await copy(text());
    button.textContent = copied ? "Copied" : "Copy failed";
    setTimeout(() => (button.textContent = "Copy"), 1500);
  });
  return button;
}

// The clipboard API requires a secure context; execCommand also works over plain HTTP.
async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text).then(() => true, () => false);
  const area = element("textarea", { value: text });
  const focused = document.activeElement;
  document.body.append(area);
  area.select();
  const copied = document.execCommand("copy");
  area.remove();
  focused?.focus();
  return copied;
}

const INLINE = /`([^`\n]+)`|\*\*([^*\n]+)\*\*|(?<![\w*])\*([^*\s][^*\n]*)\*(?![\w*])/g;

function inline(text) {
  const nodes = [];
  let end = 0;
  for (const match of text.matchAll(INLINE)) {
    nodes.push(text.slice(end, match.index));
    const [, code, strong, emphasis] = match;
    nodes.push(element(code ? "code" : strong ? "strong" : "em", { textContent: code ?? strong ?? emphasis }));
    end = match.index + match[0].length;
  }
  return [...nodes, text.slice(end)];
}

const HEADING = /^ {0,3}#{1,6} +(.*)/, BULLET = /^ *[-*+] +(.*)/, NUMBERED = /^ *(\d+)[.)] +(.*)/, ROW = /^ *\|(.*)\| *$/;
const BLOCK_PATTERNS = { blank: /^\s*$/, heading: HEADING, bullets: BULLET, numbers: NUMBERED, table: ROW, text: /^/ };

function listItems(lines, pattern) {
  return lines.map((line) => {
    const className = line.startsWith("  ") ? "nested" : "";
    return element("li", { className }, ...inline(line.match(pattern).at(-1)));
  });
}

const BLOCKS = {
  heading: (lines) => element("h3", {}, ...inline(lines[0].match(HEADING)[1])),
  bullets: (lines) => element("ul", {}, ...listItems(lines, BULLET)),
  numbers: (lines) =>
    element("ol", { start: Number(lines[0].match(NUMBERED)[1]) }, ...listItems(lines, NUMBERED)),
  table(lines) {
    if (!/^[\s|:-]+$/.test(lines[1] ?? "")) return BLOCKS.text(lines);
    const cells = (line, tag) => line.match(ROW)[1].split("|").map((cell) => element(tag, {}, ...inline(cell.trim())));
    const rows = lines.slice(2).map((line) => element("tr", {}, ...cells(line, "td")));
    return element("table", {}, element("tr", {}, ...cells(lines[0], "th")), ...rows);
  },
  text: (lines) => element("p", {}, ...inline(lines.join("\n").trim())),
};

// Return the blocks of a text: consecutive lines of the same type.
function blocks(text) {
  const groups = [];
  for (const line of text.split("\n")) {
    const type = Object.keys(BLOCK_PATTERNS).find((name) => BLOCK_PATTERNS[name].test(line));
    if (type === groups.at(-1)?.type && type !== "heading") groups.at(-1).lines.push(line);
    else groups.push({ type, lines: [line] });
  }
  return groups.filter(({ type }) => type !== "blank").map(({ type, lines }) => BLOCKS[type](lines));
}

function codeBlock(language, code) {
  const head = element("div", { className: "code-head" }, language, copyButton(() => code, "Copy code"));
  return element("div", { className: "code" }, head, element("pre", { tabIndex: 0 }, code));
}

// Return the nodes of a text; an unclosed code fence extends to the end of the text.
export function markdown(text) {
  return text.split(/^ {0,3}```/m).flatMap((part, i) => {
    if (i % 2 === 0) return blocks(part);
    const [language, ...lines] = part.split("\n");
    return [codeBlock(language.trim(), lines.join("\n").replace(/\n$/, ""))];
  });
}
