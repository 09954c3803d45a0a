"""Models, and worker threads that write with them. Knows nothing of HTTP.

engine           worker threads and a bounded queue
model_choice     the models that are offered, by name
offered_model    the base of all of them, and how one joins the swarm
language_model   one of them that writes: its client in the swarm, its tokenizer, perhaps a local copy
chat_templates   its chat template, in processes that are killed if they take too long
generation       one request: a session of its own, tokens out, cancellation, the local fallback, a trace of its time
embedding_model  models that give embeddings, and models that say how well a text fits a query
audio_model      a model that writes down what is said in a sound
vision           pictures in chats, as a model takes them, and memory for all that requests unpack
"""
