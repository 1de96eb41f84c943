def bar_10():
    return []
