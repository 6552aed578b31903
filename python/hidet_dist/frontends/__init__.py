"""Front ends: conversion of models of other libraries to graphs."""
