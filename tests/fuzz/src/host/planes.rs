//! What an honest plane and an honest scrubber do.

use fabric_proto::host::StoppedBy;
use fabric_proto::ids::{GrantId, LinkId, TransferId};

use super::Driver;
use super::model::{Grant, Writer};
use super::step::Step;

impl Driver<'_> {
    pub(super) fn armed(&mut self) {
        let grants = self.grants(|grant| !grant.armed);
        if let Some(grant) = self.script.pick(grants) {
            self.world.step(&Step::Armed(grant));
        }
    }

    pub(super) fn landed(&mut self) {
        let grants = self.grants(|grant| grant.armed);
        if let Some(grant) = self.script.pick(grants) {
            self.world.step(&Step::Landed(grant));
        }
    }

    /// A drain arrives, which any writer may send at any time; or a fence is done, or was not even
    /// needed, since the grant could not be armed.
    pub(super) fn writes_stopped(&mut self) {
        let by = if self.script.byte() & 1 == 0 {
            StoppedBy::Drain
        } else {
            StoppedBy::Fence
        };
        let grants = self.grants(|grant| match by {
            StoppedBy::Drain => grant.armed,
            StoppedBy::Fence => grant.fencing || !grant.armed,
        });
        if let Some(grant) = self.script.pick(grants) {
            self.world.step(&Step::WritesStopped(grant, by));
        }
    }

    pub(super) fn written(&mut self) {
        let writers = self.writers(|writer| writer.outstanding_bytes > 0);
        if let Some((transfer, writer)) = self.script.pick(writers) {
            let pages = u64::from(self.script.below(4)) + 1;
            let bytes = (pages * u64::from(super::PAGE_BYTES)).min(writer.outstanding_bytes);
            self.world
                .step(&Step::Written(transfer, writer.grant, bytes));
        }
    }

    pub(super) fn writer_failed(&mut self) {
        let writers = self.writers(|_| true);
        if let Some((transfer, writer)) = self.script.pick(writers) {
            self.world.step(&Step::WriterFailed(transfer, writer.grant));
        }
    }

    pub(super) fn reads_stopped(&mut self) {
        let broken = self.script.seldom();
        let writers = self.writers(|writer| writer.ending || broken);
        if let Some((transfer, writer)) = self.script.pick(writers) {
            self.world.step(&Step::ReadsStopped(transfer, writer.grant));
        }
    }

    pub(super) fn scrubbed(&mut self) {
        if let Some((pool, slots)) = self.script.pick(self.world.model.scrubs.clone()) {
            self.world.step(&Step::Scrubbed(pool, slots));
        }
    }

    /// Everybody on this host does what is due, but for what the script leaves out.
    pub(super) fn honest_round(&mut self) {
        let left_out = self.script.byte();
        let parts: [fn(&mut Self); 6] = [
            Self::scrub_all,
            Self::arm_all,
            Self::hear_all,
            Self::write_all,
            Self::stop_all,
            Self::engines_verify,
        ];
        for (bit, part) in parts.into_iter().enumerate() {
            if left_out >> bit & 1 == 0 {
                part(self);
            }
        }
    }

    /// What the plane and the scrubber owe, and nothing that anybody else must do.
    pub(super) fn planes_answer(&mut self) {
        self.scrub_all();
        self.arm_all();
        self.stop_all();
    }

    fn scrub_all(&mut self) {
        for (pool, slots) in self.world.model.scrubs.clone() {
            self.world.step(&Step::Scrubbed(pool, slots));
        }
    }

    fn arm_all(&mut self) {
        for grant in self.grants(|grant| !grant.armed) {
            self.world.step(&Step::Armed(grant));
        }
    }

    fn hear_all(&mut self) {
        // Each message may lead to another, and none leads to many.
        for _ in 0..32 {
            self.loopback();
        }
    }

    fn write_all(&mut self) {
        for (transfer, writer) in self.writers(|writer| writer.outstanding_bytes > 0) {
            let bytes = writer.outstanding_bytes;
            self.world
                .step(&Step::Written(transfer, writer.grant, bytes));
        }
    }

    /// Ends what is ending; the drain of a writer on this host arrives with it.
    fn stop_all(&mut self) {
        for (transfer, writer) in self.writers(|writer| writer.ending) {
            let own = self.world.model.sends[&transfer].link == Some(LinkId::LOOPBACK);
            self.world.step(&Step::ReadsStopped(transfer, writer.grant));
            let armed = self.grants(|grant| grant.armed && !grant.fencing);
            if own && armed.contains(&writer.grant) {
                let drain = Step::WritesStopped(writer.grant, StoppedBy::Drain);
                self.world.step(&drain);
            }
        }
        for grant in self.grants(|grant| grant.fencing) {
            self.world
                .step(&Step::WritesStopped(grant, StoppedBy::Fence));
        }
    }

    fn grants(&self, which: impl Fn(&Grant) -> bool) -> Vec<GrantId> {
        let grants = self.world.model.grants.iter();
        grants
            .filter(|(_, grant)| which(grant))
            .map(|(id, _)| *id)
            .collect()
    }

    fn writers(&self, which: impl Fn(&Writer) -> bool) -> Vec<(TransferId, Writer)> {
        let sends = self.world.model.sends.iter();
        let writers = sends.filter_map(|(id, send)| Some((*id, send.writer?)));
        writers.filter(|(_, writer)| which(writer)).collect()
    }
}
