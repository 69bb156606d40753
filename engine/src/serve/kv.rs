//! The paged cache over the registered pool: the model's pages are the slots of a lease.

use std::ops::Range;

use bytes::Bytes;
use fabric_client::{Delivered, HeldLease, Sending};
use half::f16;

use crate::kv::{KvShape, PagedKv};

fn elements(bytes: &[u8]) -> &[f16] {
    bytemuck::cast_slice(bytes)
}

fn elements_mut(bytes: &mut [u8]) -> &mut [f16] {
    bytemuck::cast_slice_mut(bytes)
}

fn region_of(region: usize) -> u16 {
    u16::try_from(region).expect("a model has fewer regions than a pool may have")
}

fn position_of(position: usize) -> u32 {
    u32::try_from(position).expect("a lease has fewer slots than 2^32")
}

/// A prompt's pages while they are computed and sent.
pub(super) struct SendingKv {
    pub(super) sending: Sending,
    pub(super) shape: KvShape,
}

impl PagedKv for SendingKv {
    fn shape(&self) -> KvShape {
        self.shape
    }

    fn slots(&self) -> usize {
        self.sending.slots() as usize
    }

    fn page(&self, region: usize, position: usize) -> &[f16] {
        elements(self.sending.page(region_of(region), position_of(position)))
    }

    fn page_mut(&mut self, region: usize, position: usize) -> &mut [f16] {
        elements_mut(
            self.sending
                .page_mut(region_of(region), position_of(position)),
        )
    }

    fn seal(&mut self, region: usize, positions: Range<usize>) -> anyhow::Result<()> {
        let positions = position_of(positions.start)..position_of(positions.end);
        Ok(self.sending.seal_blocking(region_of(region), positions)?)
    }
}

/// A delivered prompt, and the slots for what is generated.
///
/// The last page of the prompt may have room left; the first tokens generated go there.
pub(super) struct DeliveredKv {
    pub(super) prompt: Delivered,
    /// `None` where the prompt's last slot has room for all of it.
    pub(super) rest: Option<HeldLease>,
    pub(super) shape: KvShape,
}

impl DeliveredKv {
    /// Which lease a position is in, and where.
    fn find(&self, position: usize) -> (bool, u32) {
        let prompt = self.prompt.slots().len();
        if position < prompt {
            (true, position_of(position))
        } else {
            (false, position_of(position - prompt))
        }
    }

    fn rest(&self) -> &HeldLease {
        self.rest
            .as_ref()
            .expect("the model checks positions against `slots`")
    }

    pub(super) fn payload(&self) -> Bytes {
        self.prompt.payload().clone()
    }
}

impl PagedKv for DeliveredKv {
    fn shape(&self) -> KvShape {
        self.shape
    }

    fn slots(&self) -> usize {
        self.prompt.slots().len() + self.rest.as_ref().map_or(0, |rest| rest.slots().len())
    }

    fn page(&self, region: usize, position: usize) -> &[f16] {
        let region = region_of(region);
        // S2: the prompt's pages are reached through `Delivered`, and by no other way.
        elements(match self.find(position) {
            (true, position) => self.prompt.page(region, position),
            (false, position) => self.rest().page(region, position),
        })
    }

    fn page_mut(&mut self, region: usize, position: usize) -> &mut [f16] {
        let region = region_of(region);
        elements_mut(match self.find(position) {
            (true, position) => self.prompt.page_mut(region, position),
            (false, position) => {
                let rest = self.rest.as_mut();
                let rest = rest.expect("the model checks positions against `slots`");
                rest.page_mut(region, position)
            }
        })
    }
}
