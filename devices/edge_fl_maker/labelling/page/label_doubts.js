"use strict";
/* The list "Labels to look at": the files whose label is probably wrong, the likeliest first. F gives the first one the class that it rather
   is, R says that its label is right; a button does it for any. As with the item to label, nothing can be done to one before it has been on
   the screen for SEEN_MS. Loaded before label.js, whose functions are used when something happens. */

function drawDoubts() {
  const found = view.examined, box = $("doubts");
  $("examine").disabled = waiting;
  $("examined").textContent = [found.words, ...found.remarks].filter(Boolean).join("; ");
  const keys = found.labels.map(doubtKey);
  for (const old of [...box.children]) if (!keys.includes(old.dataset.key)) old.remove();
  found.labels.forEach((each, place) => {
    const shown = [...box.children].find((one) => one.dataset.key === doubtKey(each)) || doubtElement(each);
    if (box.children[place] !== shown) box.insertBefore(shown, box.children[place] || null);
    for (const button of shown.querySelectorAll("button")) button.disabled = waiting || !shown.dataset.seen;
  });
}

const doubtKey = (each) => each.name + " " + each.version;

function doubtElement(each) {
  const element = document.createElement("li"), image = new Image(), words = document.createElement("p"), box = document.createElement("div");
  element.dataset.key = doubtKey(each);
  image.alt = capital(view.word) + " labelled " + each.class_name;
  words.textContent = each.class_name + ", rather " + each.likely + ": " + each.why;
  box.append(
    doubtAction(each.likely, "F", () => settle("/api/label/correct", each, { class_name: each.likely }, "Now " + each.likely)),
    doubtAction("It is " + each.class_name, "R", () => settle("/api/label/approve", each, {}, "Right: " + each.class_name)));
  element.append(image, words, box);
  image.src = address(each);
  const see = () => setTimeout(() => { element.dataset.seen = "yes"; draw(); }, SEEN_MS);
  image.decode().then(see, () => { image.alt = each.name + " cannot be shown"; see(); });
  return element;
}

function doubtAction(text, key, work) {
  const button = document.createElement("button"), hint = document.createElement("kbd");
  hint.textContent = key;
  button.append(text + " ", hint);
  button.onclick = (event) => { if (event.detail < 2) work(); };  // not the second click of a double click
  return button;
}

const settle = (path, each, body, text) => act(async () => {
  const answer = await request(path, { client, name: each.name, version: each.version, ...body });
  done.push([answer.action, text]);
  say(text);
  adopt(answer.view);
});

/* The button of the first label to look at that a key presses, if there is one. */
function doubtButton(key) {
  const place = { f: 0, r: 1 }[key.toLowerCase()], first = $("doubts").firstElementChild;
  return first && place !== undefined ? first.querySelectorAll("button")[place] : null;
}

window.addEventListener("DOMContentLoaded", () => {
  $("examine").onclick = () => act(async () => adopt(await request("/api/label/examine", { client })));
});
