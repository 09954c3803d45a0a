"""The APIs that people's programs know: who asks what, and how it is answered. `requests/` checks what is asked.

responder           from a request to its answer, whole or as a stream
openai_routes       /v1/…: what OpenAI's clients ask
translated_routes        what Anthropic's and Ollama's clients ask, and /v1/responses: translations to chats
anthropic_messages  Anthropic's requests and answers
ollama              Ollama's
responses           OpenAI's items
stored_responses    those that are kept for the next request
embedding_routes    /v1/embeddings, and Ollama's
rerank_routes       /v1/rerank: texts in the order in which they fit a query
audio_routes        /v1/audio/transcriptions and translations
transcripts         the shapes of what was heard
token_routes        /tokenize and /detokenize
websocket           the same as messages of a WebSocket
answers             what the answers of all APIs share
openai_answers      the shapes of OpenAI's
openapi             the OpenAPI document, which /docs shows
"""
