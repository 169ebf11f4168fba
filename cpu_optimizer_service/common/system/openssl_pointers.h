// OpenSSL's objects, which are freed with their last pointer.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_SYSTEM_OPENSSL_POINTERS_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_SYSTEM_OPENSSL_POINTERS_H_

#include <openssl/bio.h>
#include <openssl/evp.h>
#include <openssl/x509.h>

#include <memory>

namespace ballast::openssl {

template <auto kFree>
struct Freed {
  template <typename T>
  void operator()(T* object) const {
    kFree(object);
  }
};
using Certificate = std::unique_ptr<X509, Freed<X509_free>>;
using Key = std::unique_ptr<EVP_PKEY, Freed<EVP_PKEY_free>>;
using Bytes = std::unique_ptr<BIO, Freed<BIO_free>>;

}  // namespace ballast::openssl

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_SYSTEM_OPENSSL_POINTERS_H_
