"""specsot.states.schedule"""
