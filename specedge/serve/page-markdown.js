// The Markdown that chat models write, as nodes: nothing of an answer is parsed as HTML.

export function element(tag, properties = {}, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
}

export function copyButton(text, label) {
  const button = element("button", { type: "button", className: "small", textContent: "Copy", ariaLabel: label });
  button.addEventListener("click", async () => {
    const copied = await copy(text());
    button.textContent = copied ? "Copied" : "Not copied";
    setTimeout(() => (button.textContent = "Copy"), 1500);
  });
  return button;
}

// The clipboard is for secure contexts only; a selection works over plain HTTP, too.
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

function paragraphs(text) {
  return text.split(/\n{2,}/).filter((part) => part.trim()).map((part) => {
    const lines = part.split("\n").filter((line) => line.trim());
    const heading = lines.length === 1 && lines[0].match(/^#{1,6} +(.*)/);
    if (heading) return element("h3", {}, ...inline(heading[1]));
    const items = lines.map((line) => line.match(/^ *(?:[-*+]|(\d+)[.)]) +(.*)/));
    if (!items.every(Boolean)) return element("p", {}, ...inline(part.trim()));
    const list = element(items[0][1] ? "ol" : "ul", {}, ...items.map((item) => element("li", {}, ...inline(item[2]))));
    if (items[0][1]) list.start = Number(items[0][1]);
    return list;
  });
}

function codeBlock(language, code) {
  const head = element("div", { className: "code-head" }, language, copyButton(() => code, "Copy code"));
  return element("div", { className: "code" }, head, element("pre", { tabIndex: 0 }, code));
}

// Return the nodes of a text; a fence that is not closed yet goes to the text's end.
export function markdown(text) {
  return text.split(/^ {0,3}```/m).flatMap((part, i) => {
    if (i % 2 === 0) return paragraphs(part);
    const [language, ...lines] = part.split("\n");
    return [codeBlock(language.trim(), lines.join("\n").replace(/\n$/, ""))];
  });
}
