//! The offer: an opaque signed capability, made and read only by the destination's daemon.

use core::time::Duration;

use bytes::Bytes;
use prost::Message;

use super::pb;
use super::{
    DecodeError, Incarnation, LeaseId, NodeId, RequestId, Secret, Tag, TenantId, TokenRange,
};
use crate::limits::OFFER_BYTES_MAX;
use crate::time::Now;

/// Where to write, for which request, until when.
///
/// Everybody can read one (the source must know whom to ask); only the daemon that made it can tell
/// that it is true, and it is the only one that must.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub struct Offer {
    /// The destination's node.
    pub node: NodeId,
    /// The destination daemon's life.
    pub incarnation: Incarnation,
    /// The lease that it offers.
    pub lease: LeaseId,
    /// For whom.
    pub tenant: TenantId,
    /// For which request.
    pub request: RequestId,
    /// Which tokens are to be written.
    pub tokens: TokenRange,
    /// When it expires, on the destination's own clock, to the millisecond.
    pub expires: Now,
}

impl Offer {
    /// Encodes and signs the offer.
    #[must_use]
    pub fn sign(&self, key: &Secret) -> Bytes {
        let body = pb::OfferBody {
            node: Bytes::copy_from_slice(&self.node.0),
            incarnation: self.incarnation.as_u64(),
            lease: self.lease.0,
            tenant: self.tenant.as_str().into(),
            request: self.request.as_str().into(),
            tokens: Some(self.tokens.into()),
            expires_ms: u64::try_from(self.expires.0.as_millis()).unwrap_or(u64::MAX),
        };
        let body = Bytes::from(body.encode_to_vec());
        let mac = Bytes::copy_from_slice(&mac(key, &body).0);
        let offer = Bytes::from(pb::SignedOffer { body, mac }.encode_to_vec());
        assert!(
            offer.len() <= OFFER_BYTES_MAX,
            "names are bounded, so offers are"
        );
        offer
    }

    /// Reads an offer without believing it: what the source's daemon may do.
    ///
    /// # Errors
    ///
    /// [`DecodeError`], where the bytes are no offer.
    pub fn peek(offer: &Bytes) -> Result<Self, DecodeError> {
        Ok(Self::open(offer)?.0)
    }

    /// Reads an offer and its MAC's truth: what the destination's daemon must do.
    ///
    /// # Errors
    ///
    /// [`DecodeError`], where the bytes are no offer. `Ok(None)` is one with a wrong MAC.
    // S7: an offer that this daemon did not make opens nothing.
    pub fn verify(offer: &Bytes, key: &Secret) -> Result<Option<Self>, DecodeError> {
        let (value, body, tag) = Self::open(offer)?;
        Ok((mac(key, &body) == tag).then_some(value))
    }

    fn open(offer: &Bytes) -> Result<(Self, Bytes, Tag), DecodeError> {
        let (got, want) = (offer.len(), OFFER_BYTES_MAX);
        if got > want {
            return Err(DecodeError::TooLong { got, want });
        }
        let malformed = |_| DecodeError::Malformed { bytes: got };
        let signed = pb::SignedOffer::decode(offer.clone()).map_err(malformed)?;
        let body = pb::OfferBody::decode(signed.body.clone()).map_err(malformed)?;
        let value = Self {
            node: NodeId(super::convert::array("offer.node", &body.node)?),
            incarnation: super::convert::incarnation(body.incarnation)?,
            lease: LeaseId(body.lease),
            tenant: super::convert::tenant(&body.tenant)?,
            request: super::convert::request(&body.request)?,
            tokens: super::convert::required("offer.tokens", body.tokens)?.into(),
            expires: Now(Duration::from_millis(body.expires_ms)),
        };
        Ok((
            value,
            signed.body,
            Tag(super::convert::array("offer.mac", &signed.mac)?),
        ))
    }
}

fn mac(key: &Secret, body: &[u8]) -> Tag {
    Tag(*blake3::keyed_hash(&key.0, body).as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offer() -> Offer {
        Offer {
            node: NodeId([3; 32]),
            incarnation: Incarnation::new(9).unwrap(),
            lease: LeaseId(4),
            tenant: TenantId::new("acme").unwrap(),
            request: RequestId::new("r-1").unwrap(),
            tokens: TokenRange {
                start: 16,
                count: 100,
            },
            expires: Now(Duration::from_millis(1500)),
        }
    }

    #[test]
    fn an_offer_is_believed_only_with_the_key_that_made_it() {
        let signed = offer().sign(&Secret([1; 32]));
        assert_eq!(Offer::verify(&signed, &Secret([1; 32])), Ok(Some(offer())));
        assert_eq!(Offer::verify(&signed, &Secret([2; 32])), Ok(None));
        assert_eq!(Offer::peek(&signed), Ok(offer()));
    }

    #[test]
    fn an_offer_may_be_as_long_as_the_limit_and_no_longer() {
        let peek = |bytes| Offer::peek(&Bytes::from(alloc::vec![0xff; bytes]));
        let (bytes, want) = (OFFER_BYTES_MAX, OFFER_BYTES_MAX);
        assert_eq!(peek(bytes), Err(DecodeError::Malformed { bytes }));
        let got = want + 1;
        assert_eq!(peek(got), Err(DecodeError::TooLong { got, want }));
    }

    #[test]
    fn no_changed_bit_of_an_offer_is_believed() {
        let signed = offer().sign(&Secret([1; 32]));
        for bit in 0..signed.len() * 8 {
            let mut bytes = signed.to_vec();
            bytes[bit / 8] ^= 1 << (bit % 8);
            let believed = Offer::verify(&Bytes::from(bytes), &Secret([1; 32]));
            assert!(!matches!(believed, Ok(Some(_))), "bit {bit} was believed");
        }
    }
}
