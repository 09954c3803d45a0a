"""The bodies of requests: every field is honoured exactly, or refused.

request_bodies   the class of all bodies, ways to choose tokens, completions
chat_request     chats: messages and tools in them
remote_pictures  pictures that are named by their address on the web
uploads          forms with a file, taken in as they come
"""
