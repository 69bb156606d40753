//! What the rest of the daemon says of the `verbs` plane, whether it is built in or not.

/// How grants may be given.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum VerbsMode {
    /// By the whole pool's key, to peers that are trusted like oneself.
    Lane,
    /// By none: the destination reads what its peer exposes to it, page by page. Also whether peers
    /// may read from here in their turn.
    Pull,
    /// By a memory window for each contiguous run of pages.
    Window,
}

/// What the operator says of the plane.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct VerbsSettings {
    /// Devices to use; empty: all.
    pub devices: Vec<String>,
    /// The preferred first.
    pub modes: Vec<VerbsMode>,
    /// How many transfers from one peer may write at a time; each has a queue pair for every port
    /// here.
    pub lanes: usize,
}

/// Who opens the plane's stream on a link: whoever opened the link.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Opener {
    /// The peer.
    Peer,
    /// We.
    Us,
}
