//! Who may be at the other end of a link: certificates by their hash, and nothing else.
//!
//! A certificate says nothing but its key. Whoever proves, in the handshake, to have the key of a
//! certificate whose BLAKE3 hash is on the allow-list is that node. Names, dates and issuers are
//! not looked at: there is no authority to trust, and none to fool.

use std::sync::Arc;

use fabric_proto::ids::NodeId;
use quinn::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use rustls::client::Resumption;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::ring::{cipher_suite, default_provider};
use rustls::crypto::{CryptoProvider, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::NoServerSessionStorage;
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::version::TLS13;
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, DistinguishedName, Error, ServerConfig,
    SignatureScheme,
};
use thiserror::Error as ThisError;
use tracing::warn;

use super::allow::AllowList;
use crate::store::{Identity, node_id};

/// Why a connection cannot be configured.
#[derive(Debug, ThisError)]
pub enum TlsError {
    /// The provider has no cipher suite for QUIC's first packets. It has.
    #[error("no cipher suite for QUIC: {0}")]
    Suite(#[from] quinn::crypto::rustls::NoInitialCipherSuite),
    /// The identity cannot be used.
    #[error("use the identity: {0}")]
    Tls(#[from] Error),
}

/// The configuration that accepts the peers of the allow-list.
pub(super) fn server(
    identity: &Identity,
    allowed: Arc<AllowList>,
) -> Result<QuicServerConfig, TlsError> {
    let provider = Arc::new(provider());
    let verifier = Arc::new(AcceptListed {
        allowed,
        provider: Arc::clone(&provider),
    });
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&TLS13])?
        .with_client_cert_verifier(verifier)
        .with_single_cert(vec![identity.certificate.clone()], key(identity))?;
    config.alpn_protocols = vec![ALPN.to_vec()];
    // Who is taken off the list must not come back on an old ticket.
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    Ok(QuicServerConfig::try_from(config)?)
}

/// The configuration that connects to `node`, and to nobody else.
pub(super) fn client(identity: &Identity, node: NodeId) -> Result<QuicClientConfig, TlsError> {
    let provider = Arc::new(provider());
    let verifier = Arc::new(ExpectNode {
        node,
        provider: Arc::clone(&provider),
    });
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&TLS13])?
        .dangerous()
        .with_custom_certificate_verifier(verifier)
        .with_client_auth_cert(vec![identity.certificate.clone()], key(identity))?;
    config.alpn_protocols = vec![ALPN.to_vec()];
    config.resumption = Resumption::disabled();
    Ok(QuicClientConfig::try_from(config)?)
}

/// The node at the other end of a connection whose handshake is complete.
pub(super) fn peer_node(connection: &quinn::Connection) -> Option<NodeId> {
    let identity = connection.peer_identity()?;
    let chain = identity.downcast::<Vec<CertificateDer<'static>>>().ok()?;
    Some(node_id(chain.first()?))
}

fn key(identity: &Identity) -> PrivateKeyDer<'static> {
    PrivateKeyDer::Pkcs8(identity.key.clone_key())
}

/// Ring's, with the cipher that hardware is fastest at in front.
fn provider() -> CryptoProvider {
    CryptoProvider {
        cipher_suites: vec![
            cipher_suite::TLS13_AES_128_GCM_SHA256,
            cipher_suite::TLS13_AES_256_GCM_SHA384,
            cipher_suite::TLS13_CHACHA20_POLY1305_SHA256,
        ],
        ..default_provider()
    }
}

const REFUSED: Error = Error::InvalidCertificate(CertificateError::ApplicationVerificationFailure);

/// Accepts any node of the allow-list.
#[derive(Debug)]
struct AcceptListed {
    allowed: Arc<AllowList>,
    provider: Arc<CryptoProvider>,
}

// S7: only a listed node, which has shown its key, gets a link.
impl ClientCertVerifier for AcceptListed {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let node = node_id(end_entity);
        if self.allowed.find(node).is_none() {
            warn!(%node, "refused a peer that is not on the allow-list");
            return Err(REFUSED);
        }
        Ok(ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _certificate: &CertificateDer<'_>,
        _signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(REFUSED)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls13_signature(message, certificate, signature, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider
            .signature_verification_algorithms
            .supported_schemes()
    }
}

/// Accepts one node.
#[derive(Debug)]
struct ExpectNode {
    node: NodeId,
    provider: Arc<CryptoProvider>,
}

// S7: we write to nobody but the node that the offer names.
impl ServerCertVerifier for ExpectNode {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let (got, want) = (node_id(end_entity), self.node);
        if got != want {
            warn!(%got, %want, "refused a peer: it is another node than the one configured");
            return Err(REFUSED);
        }
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _certificate: &CertificateDer<'_>,
        _signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(REFUSED)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls13_signature(message, certificate, signature, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider
            .signature_verification_algorithms
            .supported_schemes()
    }
}

/// The protocol's name in the handshake.
const ALPN: &[u8] = b"fabric/1";
