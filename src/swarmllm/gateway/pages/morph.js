// Makes one element like another. It adds text where that is enough, so a selection survives.

export function morph(old, now) {
  const olds = [...old.childNodes];
  const news = [...now.childNodes];
  news.forEach((node, index) => {
    const known = olds[index];
    if (!known) old.append(node);
    else if (!known.isEqualNode(node)) change(known, node);
  });
  for (const left of olds.slice(news.length)) left.remove();
}

function change(known, node) {
  if (known.nodeType === Node.TEXT_NODE && node.nodeType === Node.TEXT_NODE) {
    if (node.data.startsWith(known.data)) known.appendData(node.data.slice(known.data.length));
    else known.data = node.data;
  } else if (known.nodeType === Node.ELEMENT_NODE && known.cloneNode().isEqualNode(node.cloneNode())) {
    morph(known, node);
  } else {
    known.replaceWith(node);
  }
}
