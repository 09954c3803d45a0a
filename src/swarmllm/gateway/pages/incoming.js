// The chunks of an answer under way.

import { noticeOf } from "/static/message.js";

// Adds chunks of one answer to its message.
export function receiver(message) {
  let began = 0;
  return (chunk) => {
    if (chunk.swarm) take(message, chunk.swarm);
    if (chunk.usage) {
      message.tokens = chunk.usage.completion_tokens;
      message.used = chunk.usage.total_tokens; // with the conversation before it
    }
    const choice = chunk.choices[0];
    const piece = choice?.delta ? choice.delta.content : choice?.text;
    const thought = choice?.delta?.reasoning_content;
    if (thought) message.reasoning = (message.reasoning ?? "") + thought;
    if (piece || thought) {
      if (piece) message.content += message.content ? piece : piece.trimStart();
      message.tokens += 1;
      began ||= performance.now();
      const seconds = (performance.now() - began) / 1000;
      if (message.tokens > 1 && seconds > 0.2) message.rate = (message.tokens - 1) / seconds;
    }
    if (choice?.finish_reason) message.finish = choice.finish_reason;
  };
}

// Events of the gateway: the route, servers that fail, and servers that take over.
function take(message, event) {
  if (event.event === "trace") {
    const trace = event.traces[0];
    if (trace.tokens_per_s) message.rate = trace.tokens_per_s;
    message.firstTokenMs = trace.first_token_ms;
    return;
  }
  const notice = noticeOf(event, message.route);
  if (event.route) {
    message.route = event.route;
    message.notices = message.notices.filter((one) => !one.queue); // it is its turn
  }
  if (event.replaced_by) message.fresh = event.replaced_by;
  if (!notice) return;
  if (event.event === "queue") notice.queue = true;
  // A repair may need several tries: show the last one only.
  while (message.notices.at(-1)?.searching) message.notices.pop();
  message.notices.push(notice);
}
