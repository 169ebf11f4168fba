// All threads of this process but one, stopped where they are: the instant at which a process dies.
#ifndef BALLAST_TESTS_HISTORIES_ENGINE_FROZEN_THREADS_H_
#define BALLAST_TESTS_HISTORIES_ENGINE_FROZEN_THREADS_H_

namespace ballast::histories {

// Stops all other threads for as long as it lives, by SIGUSR2; ends the process if one blocks that.
// They may hold any lock meanwhile, the allocator's too, so whoever has one of these allocates
// nothing and locks nothing. One at a time.
class FrozenThreads {
 public:
  FrozenThreads();
  ~FrozenThreads();
  FrozenThreads(const FrozenThreads&) = delete;
  FrozenThreads& operator=(const FrozenThreads&) = delete;
};

}  // namespace ballast::histories

#endif  // BALLAST_TESTS_HISTORIES_ENGINE_FROZEN_THREADS_H_
