"""Models and who writes with them. Knows nothing of HTTP.

engine            worker threads and a bounded queue
model_choice      the models that are offered, by name
offered_model     what all of them have
language_model    one of them that writes: its client in the swarm, its tokenizer, perhaps a local copy
chat_templates    its chat template, in a process that can be ended
room              memory for pictures and sounds, shared by all requests
pictures          pictures in chats, as it takes them
embedding_model   one of them that gives embeddings
embedding_recipe  what it makes of hidden states
ranking_model     one of them that says how well a text fits a query
hearing_model     one of them that writes down what it hears
sounds            files with sound, as it takes them
generation        one request: a session of its own, tokens out, cancellation, failover, the local fallback
trace             where the time of a request went
"""
