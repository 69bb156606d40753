//! Bugs on purpose: each takes one guard away, and the simulation must notice.
//!
//! Without `--cfg fabric_planted` the macro is the word `false`, and nothing of this is compiled.

/// Whether a bug is planted: `false` in everything that ships.
#[cfg(not(fabric_planted))]
macro_rules! planted {
    ($($bug:ident)|+) => {
        false
    };
}

/// Whether a bug is planted.
#[cfg(fabric_planted)]
macro_rules! planted {
    ($($bug:ident)|+) => {
        $($crate::planted::is_planted($crate::planted::Bug::$bug))||+
    };
}

#[cfg(fabric_planted)]
pub(crate) use bugs::is_planted;
#[cfg(fabric_planted)]
pub use bugs::{Bug, plant};

#[cfg(fabric_planted)]
mod bugs {
    use core::sync::atomic::{AtomicU8, Ordering};

    macro_rules! bugs {
        ($($(#[doc = $doc:literal])+ $name:ident,)+) => {
            /// A guard that is missing.
            #[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
            #[repr(u8)]
            pub enum Bug {
                $($(#[doc = $doc])+ $name,)+
            }

            impl Bug {
                /// Every one.
                pub const ALL: &[Self] = &[$(Self::$name,)+];
            }
        };
    }

    bugs! {
        /// S1: a deadline frees slots that a writer may still write.
        FreeOnTimeout,
        /// S1: the loss of a link is taken for the drain of its writers.
        LinkLossIsADrain,
        /// S1: asking for a drain is taken for the drain.
        DrainRequestIsADrain,
        /// S1: a slot without a lease is free, whoever may write it.
        FreeUnderGrant,
        /// S1: memory is unmapped while somebody may write it.
        UnmapUnderGrant,
        /// S2: the pages are verified at the commit, before the writes have stopped.
        VerifyBeforeFence,
        /// S2: what the engine found corrupt is delivered.
        IgnoreCorrupt,
        /// S2: pages are delivered without asking the engine.
        SkipVerification,
        /// S2: a slot is given out with another tenant's bytes in it.
        SkipScrub,
        /// S2: a slot without a lease is free, whoever reads it.
        FreeUnderPin,
        /// S2: a transfer reads its source's slots without holding them.
        ReadWithoutPin,
        /// S2: the source's slots are given back before the plane reads no more.
        UnpinBeforeReadsStop,
        /// S3: a rejected transfer counts as delivered.
        RejectedIsDelivered,
        /// S3: what was committed counts as delivered when its link is lost.
        LinkLossIsDelivered,
        /// S3: a verdict that does not come counts as a good one.
        LateVerdictIsDelivered,
        /// S4: a silent writer is waited for without end.
        WaitWithoutEnd,
        /// S4: a fence is decided on and not asked for.
        ForgetTheFence,
        /// S1: the process ends while grants are open.
        ShutdownBeforeDrained,
        /// S5: a slot that is held is leased again.
        LeaseATakenSlot,
        /// S5: whoever names a slot gets it.
        NameATakenSlot,
        /// S6: a slot's next lease has the epoch of the last.
        EpochStands,
        /// S6: each life counts its epochs from the same base.
        ReuseIncarnation,
        /// S6: an offer of an earlier life is taken, signature and all.
        AcceptAnyLife,
        /// S6: an offer is good for more than one grant.
        OfferTwice,
        /// S7: one tenant's pages are sent for another.
        IgnoreTenant,
        /// S7: an offer that this daemon never signed is taken.
        AcceptForgedOffer,
        /// S8: more is outstanding than the grant allows.
        IgnoreOutstanding,
        /// S8: one completion counts for all that is outstanding.
        WrittenFreesAll,
        /// S9: a lease gets what is there, not what it needs.
        LeaseWhatIsLeft,
        /// S9: what can never fit is told to come again.
        BusyForEver,
        /// S10: pages that are dropped while they are verified are not counted.
        DropUncounted,
        /// S10: pages that were found corrupt are not counted.
        CorruptUncounted,
    }

    /// The one that is planted, plus one; 0 where none is. Tests plant before they run anything, so
    /// no order with other memory matters.
    static PLANTED: AtomicU8 = AtomicU8::new(0);

    /// Plants a bug in every machine of this process, in place of the last one.
    pub fn plant(bug: Option<Bug>) {
        PLANTED.store(bug.map_or(0, |bug| bug as u8 + 1), Ordering::Relaxed);
    }

    pub(crate) fn is_planted(bug: Bug) -> bool {
        PLANTED.load(Ordering::Relaxed) == bug as u8 + 1
    }
}
