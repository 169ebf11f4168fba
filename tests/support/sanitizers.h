// With what this program was compiled: BALLAST_ASAN, BALLAST_TSAN (0 or 1), kSanitized.
#ifndef BALLAST_TESTS_SUPPORT_SANITIZERS_H_
#define BALLAST_TESTS_SUPPORT_SANITIZERS_H_

// Clang answers by a feature, GCC by a macro.
#ifndef __has_feature
#define __has_feature(feature) 0
#endif

#if __has_feature(address_sanitizer) || defined(__SANITIZE_ADDRESS__)
#define BALLAST_ASAN 1
#else
#define BALLAST_ASAN 0
#endif
#if __has_feature(thread_sanitizer) || defined(__SANITIZE_THREAD__)
#define BALLAST_TSAN 1
#else
#define BALLAST_TSAN 0
#endif

namespace ballast {

// Either makes a program several times slower, and has a heap of its own.
inline constexpr bool kSanitized = BALLAST_ASAN || BALLAST_TSAN;

// How often a test does what is the same code again for a sanitizer, as with another seed.
constexpr int Repeats(int times) { return kSanitized ? (times + 5) / 6 : times; }

}  // namespace ballast

#endif  // BALLAST_TESTS_SUPPORT_SANITIZERS_H_
