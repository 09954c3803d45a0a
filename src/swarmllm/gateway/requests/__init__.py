"""What may be asked of a model: every field is honoured exactly, or refused.

request_bodies   what all requests share, and completions
chat_request     chats
chat_messages    messages and tools in them
remote_pictures  pictures that are named by their address on the web
audio_request    what is asked beside a file with sound
uploads          forms with a file, taken in as they come
multipart        how a form is read
decoding_fields  ways to choose tokens
unknown_fields   what of a request is not honoured, and refused
"""
