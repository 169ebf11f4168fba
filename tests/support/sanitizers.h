#ifndef BALLAST_TESTS_SUPPORT_SANITIZERS_H_
#define BALLAST_TESTS_SUPPORT_SANITIZERS_H_

#ifndef __has_feature
#define __has_feature(feature) 0
#endif

namespace ballast {

// Whether this program was compiled with AddressSanitizer or ThreadSanitizer, several times slower.
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer) || \
    defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

}  // namespace ballast

#endif  // BALLAST_TESTS_SUPPORT_SANITIZERS_H_
