#include "tests/support/certificates.h"

#include <gtest/gtest.h>
#include <openssl/bio.h>
#include <openssl/ec.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509.h>
#include <openssl/x509v3.h>
#include <sys/stat.h>

#include <cstdio>
#include <fstream>
#include <utility>

namespace ballast {
namespace {

struct Free {
  void operator()(X509* certificate) const { X509_free(certificate); }
  void operator()(EVP_PKEY* key) const { EVP_PKEY_free(key); }
  void operator()(BIO* bytes) const { BIO_free(bytes); }
  void operator()(X509_EXTENSION* extension) const { X509_EXTENSION_free(extension); }
};
using Certificate = std::unique_ptr<X509, Free>;
using Key = std::unique_ptr<EVP_PKEY, Free>;

std::string TextOf(BIO* bytes) {
  char* begin = nullptr;
  const long size = BIO_get_mem_data(bytes, &begin);  // NOLINT: OpenSSL's type.
  return std::string(begin, static_cast<size_t>(size));
}

void Write(const std::string& path, X509* certificate) {
  const std::unique_ptr<BIO, Free> bytes(BIO_new(BIO_s_mem()));
  ASSERT_EQ(PEM_write_bio_X509(bytes.get(), certificate), 1);
  WritePrivateFile(path, TextOf(bytes.get()));
}

void Write(const std::string& path, EVP_PKEY* key) {
  const std::unique_ptr<BIO, Free> bytes(BIO_new(BIO_s_mem()));
  ASSERT_EQ(PEM_write_bio_PrivateKey(bytes.get(), key, nullptr, nullptr, 0, nullptr, nullptr), 1);
  WritePrivateFile(path, TextOf(bytes.get()));
}

// Signed by `authority`, or by itself where that is null.
Certificate Make(const TestAuthority::Request& request, EVP_PKEY* key, X509* authority,
                 EVP_PKEY* authority_key) {
  static long serial = 0;  // NOLINT
  Certificate made(X509_new());
  X509_set_version(made.get(), X509_VERSION_3);
  ASN1_INTEGER_set(X509_get_serialNumber(made.get()), ++serial);
  X509_gmtime_adj(X509_getm_notBefore(made.get()), request.begin_seconds);
  X509_gmtime_adj(X509_getm_notAfter(made.get()), request.end_seconds);
  for (const auto& [text, time] : {std::pair(request.begin, X509_getm_notBefore(made.get())),
                                   std::pair(request.end, X509_getm_notAfter(made.get()))}) {
    if (!text.empty()) EXPECT_EQ(ASN1_STRING_set(time, text.c_str(), -1), 1);
  }
  X509_set_pubkey(made.get(), key);
  X509_NAME_add_entry_by_txt(X509_get_subject_name(made.get()), "CN", MBSTRING_UTF8,
                             reinterpret_cast<const unsigned char*>(request.common_name.c_str()),
                             -1, -1, 0);
  X509* const issuer = authority == nullptr ? made.get() : authority;
  X509_set_issuer_name(made.get(), X509_get_subject_name(issuer));
  X509V3_CTX context;
  X509V3_set_ctx(&context, issuer, made.get(), nullptr, nullptr, 0);
  const std::pair<int, const char*> extension =
      authority == nullptr ? std::pair(NID_basic_constraints, "critical,CA:TRUE")
                           : std::pair(NID_subject_alt_name, "DNS:localhost,IP:127.0.0.1");
  const std::unique_ptr<X509_EXTENSION, Free> added(
      X509V3_EXT_conf_nid(nullptr, &context, extension.first, extension.second));
  X509_add_ext(made.get(), added.get(), -1);
  EXPECT_GT(X509_sign(made.get(), authority_key, EVP_sha256()), 0);
  return made;
}

}  // namespace

void WritePrivateFile(const std::string& path, const std::string& contents) {
  // In one piece: somebody may watch it.
  const std::string made = path + ".new";
  std::ofstream(made) << contents;
  ASSERT_EQ(chmod(made.c_str(), 0600), 0);
  ASSERT_EQ(rename(made.c_str(), path.c_str()), 0);
}

struct TestAuthority::Made {
  Key key;
  Certificate certificate;
};

TestAuthority::TestAuthority(std::string folder, const std::string& name)
    : folder_(std::move(folder)), name_(name), made_(std::make_unique<Made>()) {
  made_->key = Key(EVP_EC_gen("P-256"));
  made_->certificate = Make({.common_name = name}, made_->key.get(), nullptr, made_->key.get());
  Write(certificate(), made_->certificate.get());
}

TestAuthority::~TestAuthority() = default;

std::string TestAuthority::certificate() const { return folder_ + "/" + name_ + ".pem"; }

void TestAuthority::Issue(const std::string& name, const Request& request) const {
  const Key key(EVP_EC_gen("P-256"));
  const Certificate made = Make(request, key.get(), made_->certificate.get(), made_->key.get());
  Write(folder_ + "/" + name + ".pem", made.get());
  Write(folder_ + "/" + name + ".key", key.get());
}

}  // namespace ballast
