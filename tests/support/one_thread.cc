// Linked into a test that CMake knows as ONE_THREAD: such a test is left out under ThreadSanitizer, which would
// find nothing in it. If it starts a thread after all, it ends here and says so.
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

extern "C" int pthread_create(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*) {
  fputs("This test is ONE_THREAD in its CMakeLists.txt and starts a thread: take that word away.\n",
        stderr);
  abort();
}
