"""The command ``shardstore``, installed as ``shardstore.cli``: each command is one library call and its printing."""
