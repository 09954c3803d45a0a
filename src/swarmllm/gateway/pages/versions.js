// The versions of a message: its earlier texts or answers. A conversation shows one of each.
//
// `message.versions` holds all messages from this one on, for each version; null for the shown one, `message.version`.

function putAside(messages, index) {
  const [first, ...after] = messages.splice(index);
  const { versions = [null], version = 0, ...own } = first;
  versions[version] = [own, ...after];
  return versions;
}

// Show `message` in place of all messages from `index` on; they stay as another version.
export function replaceFrom(messages, index, message) {
  const versions = putAside(messages, index);
  messages.push(Object.assign(message, { versions: [...versions, null], version: versions.length }));
}

export function showVersion(messages, index, version) {
  const versions = putAside(messages, index);
  const [first, ...after] = versions[version];
  versions[version] = null;
  messages.push({ ...first, versions, version }, ...after);
}
