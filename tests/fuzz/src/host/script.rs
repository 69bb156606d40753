//! Bytes as decisions.

/// What is left of the input. After its end every decision is 0.
pub(super) struct Script<'a>(&'a [u8]);

impl<'a> Script<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    /// The next byte, while there is one.
    pub(super) fn next(&mut self) -> Option<u8> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*first)
    }

    pub(super) fn byte(&mut self) -> u8 {
        self.next().unwrap_or(0)
    }

    /// A number below `bound`.
    pub(super) fn below(&mut self, bound: u8) -> u8 {
        self.byte() % bound
    }

    /// Seldom true: for what only the dishonest do.
    pub(super) fn seldom(&mut self) -> bool {
        self.byte() >= 0xe0
    }

    /// One of several, if there are any.
    pub(super) fn pick<T: Clone>(&mut self, from: impl IntoIterator<Item = T>) -> Option<T> {
        let from: Vec<T> = from.into_iter().collect();
        let index = usize::from(self.byte());
        (!from.is_empty()).then(|| from[index % from.len()].clone())
    }

    /// The next bytes, as many as the first of them says.
    pub(super) fn slice(&mut self) -> &'a [u8] {
        let count = usize::from(self.byte()).min(self.0.len());
        let (slice, rest) = self.0.split_at(count);
        self.0 = rest;
        slice
    }
}
