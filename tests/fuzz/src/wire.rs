//! The decoders of `fabric-proto`.

use std::fmt::Debug;

use bytes::Bytes;
use fabric_proto::ids::Secret;
use fabric_proto::limits::{MESSAGE_BYTES_MAX, OFFER_BYTES_MAX};
use fabric_proto::wire::{DecodeError, Offer, PeerMessage, ToDaemon, ToEngine};

use crate::bounds;
use crate::memory::paid_for;

/// How much longer a message may become by being encoded again. A list of one number is packed
/// into a byte more than the number alone, and no message has more than three lists.
const GROWTH_BYTES_MAX: usize = 16;

/// Messages of engines to their daemon.
pub fn to_daemon(bytes: &[u8]) {
    message(bytes, ToDaemon::decode, ToDaemon::encode, bounds::to_daemon);
}

/// Messages of a daemon to its engines.
pub fn to_engine(bytes: &[u8]) {
    message(bytes, ToEngine::decode, ToEngine::encode, bounds::to_engine);
}

/// Messages between daemons.
pub fn peer_message(bytes: &[u8]) {
    let (decode, encode) = (PeerMessage::decode, PeerMessage::encode);
    message(bytes, decode, encode, bounds::peer_message);
}

fn message<T: Debug + PartialEq>(
    bytes: &[u8],
    decode: fn(Bytes) -> Result<T, DecodeError>,
    encode: fn(&T) -> Bytes,
    check: fn(&T),
) {
    let input = Bytes::copy_from_slice(bytes);
    let decoded = match paid_for(bytes.len(), || decode(input)) {
        Ok(decoded) => decoded,
        Err(error) => return refused(bytes, error),
    };
    assert!(
        bytes.len() <= MESSAGE_BYTES_MAX,
        "a long message is refused"
    );
    check(&decoded);
    let encoded = encode(&decoded);
    assert!(encoded.len() <= bytes.len() + GROWTH_BYTES_MAX);
    if encoded.len() <= MESSAGE_BYTES_MAX {
        assert_eq!(decode(encoded), Ok(decoded), "it says the same again");
    }
}

/// An error tells the truth about the bytes, where it says something of them.
fn refused(bytes: &[u8], error: DecodeError) {
    match error {
        DecodeError::Malformed { bytes: got } => assert_eq!(got, bytes.len()),
        DecodeError::TooLong { got, want } => {
            assert_eq!(got, bytes.len());
            assert!(got > want, "it is longer than the bound that it breaks");
        }
        DecodeError::Field { .. } => {}
    }
    // Whoever reports it can print it.
    assert!(!error.to_string().is_empty());
}

/// Offers: what anybody can read, and what only their daemon believes.
pub fn offer(bytes: &[u8]) {
    let key = Secret([7; 32]);
    let input = Bytes::copy_from_slice(bytes);
    let peeked = match paid_for(bytes.len(), || Offer::peek(&input)) {
        Ok(peeked) => peeked,
        Err(error) => {
            assert_eq!(Offer::verify(&input, &key), Err(error));
            return refused(bytes, error);
        }
    };
    assert!(bytes.len() <= OFFER_BYTES_MAX, "a long offer is refused");
    bounds::name(peeked.tenant.as_str());
    bounds::name(peeked.request.as_str());
    // S7: no fuzzer knows the key.
    assert_eq!(Offer::verify(&input, &key), Ok(None), "a forged offer");
    let signed = peeked.sign(&key);
    assert_eq!(Offer::verify(&signed, &key), Ok(Some(peeked.clone())));
    assert_eq!(Offer::verify(&signed, &Secret([8; 32])), Ok(None));
    assert_eq!(Offer::peek(&signed), Ok(peeked));
}
