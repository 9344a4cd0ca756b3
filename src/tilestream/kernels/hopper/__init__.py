"""Gluon, sm_90a: TMA, mbarrier ring, warp specialisation, wgmma."""
