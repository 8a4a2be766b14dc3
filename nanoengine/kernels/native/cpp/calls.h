// Calls that are made again without Python: each is the address of a function below and its arguments, eight bytes each.
#pragma once
#include <cstdint>
#include <cstring>
#include <utility>

// An argument as `c_functions.py` writes it down: floats by their bits, addresses and whole numbers as they are.
template <class A> static A argument(uint64_t word) {
    A value;
    std::memcpy(&value, &word, sizeof(A));  // its lower bytes: the machines that these kernels run on begin with them
    return value;
}

template <class R, class... A, size_t... I>
static void call_again(R (*function)(A...), const uint64_t* words, std::index_sequence<I...>) {
    function(argument<A>(words[I])...);
}

template <class R, class... A> static void call_again(R (*function)(A...), const uint64_t* words) {
    call_again(function, words, std::index_sequence_for<A...>());
}

// Stands behind a function with a C interface that recordings may call; what it returns is left out.
#define RECORDABLE(name) \
    extern "C" void name##_again(const uint64_t* words) { call_again(name, words); }
