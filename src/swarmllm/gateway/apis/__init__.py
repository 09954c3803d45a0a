"""The APIs that people's programs know: routes, and the shapes of answers. `requests/` checks what requests say.

responder           from a request to its answer, whole or as a stream
openai_routes       /v1/…: OpenAI's models, completions and chats; vLLM's /tokenize and /detokenize
anthropic_messages  Anthropic's requests and answers
ollama              Ollama's
responses           OpenAI's items, some kept for the next request
translated_routes   routes of these three: translations to chats
embedding_routes    /v1/embeddings, Ollama's, and /v1/rerank
audio_routes        /v1/audio/transcriptions and translations
websocket           chats and completions as messages of a WebSocket
"""
