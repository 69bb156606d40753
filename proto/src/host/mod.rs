//! The one machine that a daemon runs.

mod api;

pub use api::{
    Config, Input, Misbehaviour, Observation, Output, PlaneCommand, Proofs, ReadsStopped,
    ScrubPolicy, StoppedBy, Tenants, Usage, WritesStopped,
};

use crate::time::Now;
use core::marker::PhantomData;

/// The machine. See the module.
#[derive(Debug)]
pub struct Host<P: Proofs>(PhantomData<fn(P)>);

impl<P: Proofs> Host<P> {
    /// A machine at the start of its life.
    #[must_use]
    pub fn new(_config: Config) -> Self {
        Self(PhantomData)
    }

    /// Takes in what happened.
    pub fn handle(&mut self, _now: Now, _input: Input<P>) {}

    /// Gives what to do next; `None` until the next input.
    pub fn poll(&mut self) -> Option<Output> {
        None
    }

    /// When to call with [`Input::Tick`], if nothing else happens first.
    #[must_use]
    pub fn deadline(&self) -> Option<Now> {
        None
    }

    /// How full the pools are.
    #[must_use]
    pub fn usage(&self) -> Usage {
        Usage::default()
    }

    /// Recounts everything from scratch and panics where a count or an invariant is off.
    pub fn invariants(&self) {}
}
