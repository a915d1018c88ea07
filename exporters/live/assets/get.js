// Asks the exporter, and only for what is new.
const TIMEOUT_MS = 10000;
const MOST_REMEMBERED = 500;
const etags = new Map();

/** No answer, or one that isn't the page's: what is shown stays, and is asked for again. */
export class Unreachable extends Error {}

/** The answer, or null when it hasn't changed since this address was last asked for. Throws Unreachable. */
export async function get(url) {
  const headers = etags.has(url) ? {"If-None-Match": etags.get(url)} : {};
  let answer;
  try {
    answer = await fetch(url, {headers, signal: AbortSignal.timeout(TIMEOUT_MS)});
  } catch {
    throw new Unreachable("no answer");
  }
  if (answer.status === 304) return null;
  if (!answer.ok && answer.status !== 404) throw new Unreachable(`the answer is HTTP ${answer.status}`);
  const etag = answer.headers.get("ETag");
  if (answer.ok && etag) {
    if (etags.size >= MOST_REMEMBERED) etags.clear();
    etags.set(url, etag);
  }
  return answer;
}

/** The body as text or JSON. Throws Unreachable where it breaks off. */
export async function read(answer, kind) {
  try {
    return await answer[kind]();
  } catch {
    etags.delete(new URL(answer.url).pathname + new URL(answer.url).search);
    throw new Unreachable("the answer broke off");
  }
}

/** The next answer from this address comes whole. */
export function forget(url) {
  etags.delete(url);
}
