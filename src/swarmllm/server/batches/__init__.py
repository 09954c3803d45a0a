"""What servers pass on to each other for requests without a session.

pushes   taken in for the request that names them, and sent to the next server
"""
